"""Collectives explained on small tensors: the available names, and the result of a run."""

import dataclasses

from stepgauge.spec.comm import OPS

RING = "ring"
MOST_RANKS = 8
Values = list[str]


@dataclasses.dataclass(frozen=True)
class Seen:
    """One rank's tensor before and after the collective, and the time it spent in the call."""

    before: Values
    after: Values
    wait_ms: float


@dataclasses.dataclass(frozen=True)
class RingStep:
    """What each rank sent in one step of a ring, and the chunks of all ranks after it."""

    name: str
    sends: Values
    chunks: list[Values]


@dataclasses.dataclass(frozen=True)
class Explained:
    """The run of one collective; `steps` only for the ring."""

    op: str
    summary: str
    ranks: list[Seen]
    steps: list[RingStep] = dataclasses.field(default_factory=list)
    remark: str = ""


def names_of(op: str, *, ranks: int) -> list[str]:
    """Returns the collectives that `op` stands for: itself, or every one for "all".

    Raises ValueError if it is unknown, or if a table cannot show so many ranks.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; a table can show 2 to {MOST_RANKS}")
    name = op.replace("-", "_")
    if name not in (*OPS, RING, "all"):
        raise ValueError(f"op is {op!r}; choose one of {', '.join([*OPS, RING])}")
    return [*OPS, RING] if name == "all" else [name]
