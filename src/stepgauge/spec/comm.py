"""Collectives as they are asked for, and what each one is: who sends what, how its bandwidth is
counted.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

from stepgauge.spec.fields import check, option

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
RING_OPS = ("all_reduce", "reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "reduce", "all_reduce", "barrier")
ROOT = 0


@dataclasses.dataclass(frozen=True)
class Op:
    """A collective.

    summary   what it does, one sentence
    factor    bus bandwidth over algorithm bandwidth at N ranks, as nccl-tests derives it
    split     the size counts N parts, one a rank (else every rank has all of it)
    reduces   whether values are added
    """

    summary: str
    factor: Callable[[int], float]
    split: bool = False
    reduces: bool = False


def _all_but_own(n: int) -> float:
    return (n - 1) / n


# nccl-tests, doc/PERFORMANCE.md; gather, scatter and send/receive as in its programs.
OPS: Mapping[str, Op] = {
    "broadcast": Op("Rank 0's values come to every rank.", lambda n: 1.0),
    "reduce": Op("The sum over all ranks comes to rank 0.", lambda n: 1.0, reduces=True),
    "all_reduce": Op(
        "The sum over all ranks comes to every rank.", lambda n: 2 * (n - 1) / n, reduces=True
    ),
    "gather": Op("Every rank's part comes to rank 0.", _all_but_own, split=True),
    "all_gather": Op("Every rank's part comes to every rank.", _all_but_own, split=True),
    "scatter": Op("Rank 0's parts go out, one to each rank.", _all_but_own, split=True),
    "reduce_scatter": Op(
        "Each rank gets the sum over all ranks of its own part.",
        _all_but_own,
        split=True,
        reduces=True,
    ),
    "all_to_all": Op("Part j of rank i comes to rank j as its part i.", _all_but_own, split=True),
    "send_recv": Op(
        "Every rank sends to the next and receives from the one before.", lambda n: 1.0
    ),
    "barrier": Op("No rank goes on before all have arrived.", lambda n: 1.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommSpec:
    """One row of `bench comm`: a collective at a size, as nccl-tests prints it."""

    kind: ClassVar[str] = "comm"

    op: str = option("all_reduce", "the collective", choices=OPS, label=True)
    backend: str = option(
        "gloo",
        "library that moves the bytes; gloo takes CPU and GPU tensors",
        choices=("gloo", "nccl"),
        label=True,
    )
    algorithm: str = option(
        "library",
        "the backend's own, or our ring of sends over it",
        choices=("library", "ring"),
        label="changed",
    )
    size_bytes: int = option(
        1 << 20,
        "bytes of the whole operation; 512K, 1M, 1G are powers of 1024",
        least=0,
        most=1 << 40,
        flag="size",
        label=True,
    )
    ranks: int = option(2, "processes", least=1, most=4096, label=True)
    nodes: int = option(
        1,
        "machines that they are spread over; set by torchrun",
        least=1,
        most=4096,
        label="changed",
    )
    dtype: str = option("float32", "element type", choices=DTYPE_BYTES)
    timing: str = option(
        "pipelined",
        "pipelined: one after another without waiting; blocking: wait after each; graph: replayed "
        "as a CUDA graph",
        choices=("pipelined", "blocking", "graph"),
        label="changed",
    )
    iterations: int = option(
        20,
        "operations in a timed batch (of one, where blocking)",
        least=1,
        most=1_000_000,
        short="n",
    )
    warmup: int = option(5, "untimed operations first", least=0, most=100_000, short="w")
    seconds: float = option(
        0.3, "time batches for this long, at least five", least=0.0, most=86_400.0
    )
    check: bool = option(True, "compare every element with what it should be", short="c")
    device: str = option("cpu", "cpu, or cuda for one GPU a rank; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)
        if self.ranks == 1:
            raise ValueError("ranks is 1; a collective needs at least 2")
        if self.algorithm == "ring" and self.op not in RING_OPS:
            raise ValueError(f"op is {self.op!r}; algorithm 'ring' has {', '.join(RING_OPS)}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend is 'nccl' on device 'cpu'; NCCL moves GPU tensors only")
        if self.timing == "graph" and self.backend != "nccl":
            raise ValueError(
                f"timing is 'graph' with backend {self.backend!r}; only NCCL can be captured"
            )
        if self.op != "barrier" and self.count == 0:
            raise ValueError(
                f"size_bytes is {self.size_bytes}; {self.op} needs at least one element a rank"
            )

    def canonical(self) -> Self:
        """Without a size where nothing is sent: barriers that differ in it alone are one row."""
        return dataclasses.replace(self, size_bytes=0) if self.op == "barrier" else self

    @property
    def count(self) -> int:
        """Elements of the whole operation: as many as fit, equal shares where it is split."""
        if self.op == "barrier":
            return 0
        elements = self.size_bytes // DTYPE_BYTES[self.dtype]
        return elements // self.ranks * self.ranks if OPS[self.op].split else elements

    @property
    def bytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]

    @property
    def factor(self) -> float:
        return OPS[self.op].factor(self.ranks)

    @property
    def tensor_bytes(self) -> int:
        """Bytes a rank needs: what it gives and gets, one tensor where the library allows it."""
        return self.bytes if self.op in IN_PLACE else 2 * self.bytes


def sizes(begin: int, end: int, factor: float) -> list[int]:
    """From begin to end, each `factor` times the last. Raises ValueError if it never ends."""
    if begin < 1 or end < begin:
        raise ValueError(
            f"sizes from {begin:,} to {end:,} bytes; begin must be at least 1, and end must not be less"
        )
    if factor <= 1:
        raise ValueError(f"factor is {factor}; it must be more than 1")
    found = [begin]
    while (larger := max(found[-1] + 1, round(found[-1] * factor))) <= end:
        found.append(larger)
    return found
