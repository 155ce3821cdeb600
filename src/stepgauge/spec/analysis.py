"""What traces were found to say, of one rank and of several: plain figures, from which every table
and picture of a profile is a view.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

SCHEMA = 2
# Of older files, for views that are no more.
GONE = ("lanes", "marks", "timeline", "streams", "copies", "path", "path_error")
KINDS = (
    "communication",
    "matmul",
    "attention",
    "softmax",
    "norm",
    "elementwise",
    "reduction",
    "optimizer",
    "copy",
    "host",
    "other",
    "convolution",
    "embedding",
    "quantisation",
    "routing",
    "pooling",
    "sort",
)
TRACKS = ("computation", "communication")  # of a step's overlap, as they are drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """All calls of one kernel (on a CPU: operation) in one phase and one range, over all profiled
    steps.

    us       its calls' times, added
    busy_us  what the device's time line gave it: times in which an earlier kernel ran too are left
             out
    idle_us  what the device stood still before it
    range    dotted name, numbers of repeated parts as *: "blocks.*.attention.scores"; "" outside of
             all
    flops, bytes  by formula, of those calls whose operation has one
    """

    name: str
    kind: str
    rule: str
    phase: str
    range: str
    calls: int
    us: float
    busy_us: float
    idle_us: float
    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationRow:
    """All calls of one operation with equal shapes; FLOPs and bytes of one call, 0 if unknown."""

    operation: str
    kind: str
    shapes: str
    dtype: str
    calls: int
    us: float
    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idle:
    """Times in which the device stood still, by why."""

    reason: str
    phase: str
    gaps: int
    us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """All calls of one collective with equal arguments.

    ranks      of its group, as the trace writes them; "" where it does not say
    bytes      of the whole operation as nccl-tests counts them; 0 where the trace does not say
    calls_us   [start µs, duration µs] of each call in order, by the trace's own clock
    """

    name: str
    range: str
    ranks: str
    group_size: int
    dtype: str
    bytes: int
    calls_us: list[list[float]]

    @property
    def us(self) -> float:
        return sum(us for _, us in self.calls_us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication of one rank over all steps: how long, and how much computing hid."""

    rank: int | None
    steps: int = 1
    communication_us: float
    computation_us: float
    hidden_us: float
    exposed_us: float

    @property
    def ratio(self) -> float:
        return self.hidden_us / self.communication_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the machine reached in the same process: the roofline's two lines.

    missed_cores  what other work had of the cores that they need; 0 where nothing tells
    """

    flop_per_s: float
    bytes_per_s: float
    condition: str
    missed_cores: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """One rank's trace.

    source      the file
    on_device   kernels of a device; else operations of the host, each by what it did itself
    steps       how many steps were profiled, of those that launched any work
    phases_us   phase -> one value a step; on a device by its own time line, on a CPU on the host's
    lead_in_us, tail_us  from the first step's begin on the host to the device's first work, and from
                  its last work to the host's end of the last step: no part of the steps
    stopwatch_ms  phase -> milliseconds without the profiler, where they were taken; "step" is the
                  whole
    watched_ms    phase -> one value a step: the same stopwatch in the profiled steps themselves
    flame       nested [name, µs itself, children], all steps together
    notes       what a reader must know before the figures: sentences
    """

    source: str
    rank: int | None = None
    device: str = ""
    on_device: bool = False
    steps: int = 1
    phases_us: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    lead_in_us: float = 0.0
    tail_us: float = 0.0
    cells: list[Cell] = dataclasses.field(default_factory=list)
    operations: list[OperationRow] = dataclasses.field(default_factory=list)
    idle: list[Idle] = dataclasses.field(default_factory=list)
    overlap: Overlap | None = None
    collectives: list[CollectiveRow] = dataclasses.field(default_factory=list)
    ceilings: Ceilings | None = None
    stopwatch_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    watched_ms: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    flame: list[Any] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def step_us(self) -> float:
        """Mean time of a step."""
        return sum(map(sum, self.phases_us.values())) / self.steps

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError for text that is no analysis of this schema."""
        value = json.loads(text)
        schema = value.pop("schema", None) if isinstance(value, dict) else None
        if schema not in (1, SCHEMA):
            raise ValueError(f"not an analysis of schema {SCHEMA}")
        value = {name: what for name, what in value.items() if name not in GONE}
        try:
            for name, row in _ROWS.items():
                value[name] = [row(**fields) for fields in value.get(name, [])]
            for name, part in _PARTS.items():
                value[name] = part(**value[name]) if value.get(name) else None
            return cls(**value)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an analysis: {error}") from None


_ROWS = {
    "cells": Cell,
    "operations": OperationRow,
    "idle": Idle,
    "collectives": CollectiveRow,
}
_PARTS = {"overlap": Overlap, "ceilings": Ceilings}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCollective:
    """Calls of one collective of one group, matched across its ranks in order.

    A call can move data only once its last rank has come: `transfer_us` is the last rank's time in
    it, `waiting_us` what the others spent beyond that, the mean over all ranks. Both are of all
    calls. No clocks are compared.

    bus_bytes_per_s  of the transfer alone, as nccl-tests derives it; 0 where size or group is unknown
    last, last_calls  the rank that made the others wait longest, and in how many calls it came last
    """

    name: str
    range: str
    group_size: int
    dtype: str
    bytes: int
    calls: int
    transfer_us: float
    waiting_us: float
    bus_bytes_per_s: float
    last: int
    last_calls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """One rank, over all calls: how long it waited, how long it made the others wait (their mean),
    and in what it spent most beyond the other ranks' mean: a kind of work in a range, or idle time.
    """

    rank: int
    waited_us: float
    made_wait_us: float
    calls_last: int
    most_in: str
    excess_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossRanks:
    collectives: list[SharedCollective]
    stragglers: list[Straggler]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Sum:
    """Several cells together, in one step."""

    calls: float = 0.0
    us: float = 0.0
    busy_us: float = 0.0
    idle_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


FIGURES = [field.name for field in dataclasses.fields(Sum)]


def total(cells: Iterable[Cell], steps: int) -> Sum:
    cells = list(cells)
    return Sum(*(sum(getattr(cell, name) for cell in cells) / steps for name in FIGURES))


def sums_by(found: Analysis, *fields: str) -> dict[tuple[str, ...], Sum]:
    """The sum of the cells that agree in these fields, by their values, most time first."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in found.cells:
        groups[tuple(getattr(cell, name) for name in fields)].append(cell)
    sums = {values: total(cells, found.steps) for values, cells in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].us))
