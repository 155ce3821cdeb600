"""The spec of `bench comm`, and for each collective what it does and how its bandwidth is counted."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

from stepgauge.spec.fields import RANKS_DEVICE_HELP, check, option

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
RING_OPS = ("all_reduce", "reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "reduce", "all_reduce", "barrier")
ROOT = 0
# Between GPUs of one machine by copy engines (parallel/communication/copied_collectives.py).
COPIES, COPIED_OPS = "copies", ("all_gather", "all_to_all", "send_recv")
COPY_ALGORITHMS = ("push", "pull")
COPIED = "copied "  # before a collective's name: by copy engines


@dataclasses.dataclass(frozen=True)
class Op:
    """A collective.

    summary   one sentence on what it does
    factor    bus bandwidth / algorithm bandwidth on N ranks, as nccl-tests derives it
    split     the size is that of N parts, one per rank; otherwise every rank holds all of it
    reduces   values are summed
    """

    summary: str
    factor: Callable[[int], float]
    split: bool = False
    reduces: bool = False


def _all_but_own_part(n: int) -> float:
    return (n - 1) / n


# Factors from nccl-tests, doc/PERFORMANCE.md; gather, scatter and send_recv from its source.
OPS: Mapping[str, Op] = {
    "broadcast": Op("Every rank receives rank 0's values.", lambda n: 1.0),
    "reduce": Op("Rank 0 receives the sum over all ranks.", lambda n: 1.0, reduces=True),
    "all_reduce": Op(
        "Every rank receives the sum over all ranks.", lambda n: 2 * (n - 1) / n, reduces=True
    ),
    "gather": Op("Rank 0 receives the parts of all ranks.", _all_but_own_part, split=True),
    "all_gather": Op("Every rank receives the parts of all ranks.", _all_but_own_part, split=True),
    "scatter": Op("Rank 0 sends one part to each rank.", _all_but_own_part, split=True),
    "reduce_scatter": Op(
        "Each rank receives its part of the sum over all ranks.",
        _all_but_own_part,
        split=True,
        reduces=True,
    ),
    "all_to_all": Op(
        "Rank i sends its part j to rank j, where it becomes part i.", _all_but_own_part, split=True
    ),
    "send_recv": Op(
        "Every rank sends to the next rank and receives from the previous one.", lambda n: 1.0
    ),
    "barrier": Op("No rank continues before all have arrived.", lambda n: 1.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommSpec:
    """One row of `bench comm`: a collective at a size, with bandwidths as nccl-tests defines them."""

    kind: ClassVar[str] = "comm"

    op: str = option("all_reduce", "Collective to time", choices=OPS, label=True)
    backend: str = option(
        "gloo",
        "Communication library; gloo takes CPU and GPU tensors. copies: copy engines, between GPUs of "
        "one machine",
        choices=("gloo", "nccl", COPIES),
        label=True,
    )
    algorithm: str = option(
        "library",
        "The backend's own algorithm, or a ring of sends and receives. Copies are made by the sender "
        "(push, the default) or the receiver (pull)",
        choices=("library", "ring", *COPY_ALGORITHMS),
        label="changed",
    )
    size_bytes: int = option(
        1 << 20,
        "Bytes of the whole operation, such as 512K, 1M or 1G (powers of 1024)",
        least=0,
        most=1 << 40,
        flag="size",
        label=True,
    )
    ranks: int = option(2, "Number of processes", least=1, most=4096, label=True)
    nodes: int = option(
        1,
        "Number of machines; set by torchrun",
        least=1,
        most=4096,
        label="changed",
    )
    dtype: str = option("float32", "Element type", choices=DTYPE_BYTES)
    timing: str = option(
        "pipelined",
        "pipelined: back to back; blocking: wait after each operation; graph: replay a CUDA graph",
        choices=("pipelined", "blocking", "graph"),
        label="changed",
    )
    iterations: int = option(
        20,
        "Maximum number of operations per timed batch; with blocking it is 1",
        least=1,
        most=1_000_000,
        short="n",
    )
    warmup: int = option(5, "Warm-up operations, not timed", least=0, most=100_000, short="w")
    seconds: float = option(
        0.3, "Time batches for this long, at least five of them", least=0.0, most=86_400.0
    )
    check: bool = option(True, "Check every element of the result", short="c")
    device: str = option("cpu", RANKS_DEVICE_HELP)

    def __post_init__(self) -> None:
        check(self)
        if self.ranks == 1:
            raise ValueError("ranks is 1; a collective needs at least 2")
        if self.algorithm == "ring" and self.op not in RING_OPS:
            raise ValueError(f"op is {self.op!r}; algorithm 'ring' supports {', '.join(RING_OPS)}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend is 'nccl', which takes only GPU tensors; device is 'cpu'")
        self._check_copies()
        if self.timing == "graph" and self.backend != "nccl":
            raise ValueError(
                f"timing is 'graph', which only NCCL supports; backend is {self.backend!r}"
            )
        if self.op != "barrier" and self.count == 0:
            raise ValueError(
                f"size_bytes is {self.size_bytes}; {self.op} needs at least one element per rank"
            )

    def _check_copies(self) -> None:
        """Raises ValueError for what copy engines do not do, and for their algorithms elsewhere."""
        if self.backend != COPIES:
            if self.algorithm in COPY_ALGORITHMS:
                raise ValueError(
                    f"algorithm is {self.algorithm!r}, which needs backend 'copies'; backend is "
                    f"{self.backend!r}"
                )
            return
        if self.op not in COPIED_OPS:
            raise ValueError(
                f"op is {self.op!r}; backend 'copies' has {', '.join(COPIED_OPS)}: choose one of "
                f"them, as in --op {COPIED_OPS[0]}"
            )
        if self.algorithm == "ring":
            raise ValueError("algorithm is 'ring'; backend 'copies' has push and pull")
        if self.nodes > 1:
            raise ValueError(f"nodes is {self.nodes}; backend 'copies' works within one machine")

    def canonical(self) -> Self:
        """Drops the size of a barrier, so that barriers that differ only in size are one row. Names the
        default algorithm of copies.
        """
        if self.backend == COPIES and self.algorithm == "library":
            return dataclasses.replace(self, algorithm="push")
        return dataclasses.replace(self, size_bytes=0) if self.op == "barrier" else self

    @property
    def count(self) -> int:
        """Elements of the whole operation; for split operations a multiple of the ranks."""
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
        """Bytes of a rank's tensors: input and output, which some operations share. Copies have one of
        them twice.
        """
        if self.backend == COPIES:
            return 3 * self.bytes
        return self.bytes if self.op in IN_PLACE else 2 * self.bytes


def sizes(begin: int, end: int, factor: float) -> list[int]:
    """Returns sizes from begin to end, each `factor` times the previous one.

    Raises ValueError for a range or factor that gives no such list.
    """
    if begin < 1 or end < begin:
        raise ValueError(
            f"sizes from {begin:,} to {end:,} bytes; begin must be at least 1, and end must not be less"
        )
    if factor <= 1:
        raise ValueError(f"factor is {factor}; it must be more than 1")
    result = [begin]
    while (larger := max(result[-1] + 1, round(result[-1] * factor))) <= end:
        result.append(larger)
    return result
