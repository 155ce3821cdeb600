"""What a collective moves, as data: the picture of who sends what, and what was seen when it ran."""

import dataclasses
from collections.abc import Callable, Mapping

from stepgauge.spec.comm import OPS, ROOT

RING = "ring"
MOST_RANKS = 8
Values = list[str]


@dataclasses.dataclass(frozen=True)
class Arrow:
    """`what` goes from one rank to another as the operation means it; algorithms may differ."""

    source: int
    target: int
    what: str


@dataclasses.dataclass(frozen=True)
class Seen:
    """A rank's tensor, written out, and how long it was inside the operation."""

    before: Values
    after: Values
    wait_ms: float


@dataclasses.dataclass(frozen=True)
class RingStep:
    """All ranks' chunks after a step of a ring, and what moved in it."""

    name: str
    chunks: list[Values]
    arrows: list[Arrow]


@dataclasses.dataclass(frozen=True)
class Explained:
    op: str
    summary: str
    arrows: list[Arrow]
    ranks: list[Seen]
    steps: list[RingStep] = dataclasses.field(default_factory=list)
    remark: str = ""


def names_of(op: str, *, ranks: int) -> list[str]:
    """The operations that a word means, "all" every one. Raises ValueError for an unknown one, or a
    number of ranks that cannot be shown.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; a picture can show 2 to {MOST_RANKS}")
    names = [*OPS, RING] if op == "all" else [op.replace("-", "_")]
    for name in names:
        arrows(name, ranks)
    return names


def arrows(op: str, n: int) -> list[Arrow]:
    """Who sends what to whom between n ranks. Raises ValueError for an unknown operation."""
    if op not in _ARROWS:
        raise ValueError(f"op is {op!r}; choose one of {', '.join([*OPS, RING])}")
    return _ARROWS[op](n)


def ring_arrows(step: int, phase: str, n: int) -> list[Arrow]:
    """What moves in a step (from 0) of reduce-scatter or all-gather: one chunk to the next."""
    shift = 1 if phase == "reduce-scatter" else 0
    return [Arrow(r, (r + 1) % n, f"chunk {(r - step - shift) % n}") for r in range(n)]


def _pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(n) if i != j]


_ARROWS: Mapping[str, Callable[[int], list[Arrow]]] = {
    "broadcast": lambda n: [Arrow(ROOT, j, "all") for j in range(1, n)],
    "reduce": lambda n: [Arrow(i, ROOT, "all, to add") for i in range(1, n)],
    "all_reduce": lambda n: [Arrow(i, j, "all, to add") for i, j in _pairs(n)],
    "gather": lambda n: [Arrow(i, ROOT, f"part {i}") for i in range(1, n)],
    "all_gather": lambda n: [Arrow(i, j, f"part {i}") for i, j in _pairs(n)],
    "scatter": lambda n: [Arrow(ROOT, j, f"part {j}") for j in range(1, n)],
    "reduce_scatter": lambda n: [Arrow(i, j, f"part {j} to add") for i, j in _pairs(n)],
    "all_to_all": lambda n: [Arrow(i, j, f"part {j}") for i, j in _pairs(n)],
    "send_recv": lambda n: [Arrow(i, (i + 1) % n, "all") for i in range(n)],
    "barrier": lambda n: [Arrow(i, j, "I am here") for i, j in _pairs(n)],
    RING: lambda n: [Arrow(i, (i + 1) % n, "a chunk a step") for i in range(n)],
}
