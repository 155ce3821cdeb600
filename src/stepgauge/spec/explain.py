"""A collective shown on small tensors: which can be asked for, and what was seen when it ran."""

import dataclasses

from stepgauge.spec.comm import OPS

RING = "ring"
MOST_RANKS = 8
Values = list[str]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A rank's tensor, written out, and how long it was inside the operation."""

    before: Values
    after: Values
    wait_ms: float


@dataclasses.dataclass(frozen=True)
class RingStep:
    """What each rank sent in a step of a ring, and all ranks' chunks after it."""

    name: str
    sends: Values
    chunks: list[Values]


@dataclasses.dataclass(frozen=True)
class Explained:
    op: str
    summary: str
    ranks: list[Seen]
    steps: list[RingStep] = dataclasses.field(default_factory=list)
    remark: str = ""


def names_of(op: str, *, ranks: int) -> list[str]:
    """The operations that a word means, "all" every one. Raises ValueError for an unknown one, or a
    number of ranks that cannot be shown.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; a table can show 2 to {MOST_RANKS}")
    name = op.replace("-", "_")
    if name not in (*OPS, RING, "all"):
        raise ValueError(f"op is {op!r}; choose one of {', '.join([*OPS, RING])}")
    return [*OPS, RING] if name == "all" else [name]
