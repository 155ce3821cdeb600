"""Results of trace analysis, for one rank and across ranks: the plain data behind every table and
plot of a profile.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

SCHEMA = 2
# Fields of older files whose views no longer exist.
REMOVED_FIELDS = ("lanes", "marks", "timeline", "streams", "copies", "path", "path_error")
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
TRACKS = ("computation", "communication")  # of an overlap plot, in drawing order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """All calls of one kernel (on a CPU: one operation) in one phase and one range, over all
    profiled steps.

    us       sum of the calls' durations
    busy_us  time attributed to it on the device's time line: time during which an earlier kernel
             was still running is left out
    idle_us  time the device was idle just before its calls
    range    dotted name, with * for the index of a repeated part: "blocks.*.attention.scores"; ""
             outside any range
    flops, bytes  by formula, summed over the calls whose operation has one
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
    """All calls of one operation with the same shapes.

    flops, bytes  of one call; 0 if unknown
    """

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
    """Time during which the device was idle, for one reason in one phase."""

    reason: str
    phase: str
    gaps: int
    us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """All calls of one collective with the same arguments.

    ranks      the group's ranks as the trace writes them; "" if it does not
    bytes      of the whole operation as nccl-tests counts them; 0 if the trace does not say
    calls_us   [start µs, duration µs] of each call in order, on the trace's own clock
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
    """Communication time of one rank over all steps, and how much of it computation hid."""

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
    """The two lines of the roofline, as measured in the same process.

    missed_cores  cores that other work took during the measurement; 0 if unknown
    """

    flop_per_s: float
    bytes_per_s: float
    condition: str
    missed_cores: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """The analysis of one rank's trace.

    source      path of the trace file
    on_device   True if the cells are kernels of a device; False if they are operations of the host,
                each with its self time
    steps       number of profiled steps that launched any work
    phases_us   phase -> one value per step, on the device's time line (on a CPU: the host's)
    lead_in_us  from the begin of the first step on the host to the device's first work
    tail_us     from the device's last work to the end of the last step on the host; like lead_in_us
                not counted as part of the steps
    stopwatch_ms  phase -> ms measured without the profiler, if that was done; "step" is the sum
    watched_ms    phase -> one value per step, measured the same way in the profiled steps
    flame       nested [name, self time in µs, children], over all steps
    notes       caveats to read before the numbers, one sentence each
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
        """Mean duration of a step."""
        return sum(map(sum, self.phases_us.values())) / self.steps

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses the output of `to_json`. Raises ValueError if the text is not an analysis."""
        value = json.loads(text)
        schema = value.pop("schema", None) if isinstance(value, dict) else None
        if schema not in (1, SCHEMA):
            raise ValueError(f"not an analysis of schema {SCHEMA}")
        value = {name: content for name, content in value.items() if name not in REMOVED_FIELDS}
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
    """The calls of one collective in one group, matched across its ranks by their order.

    A call can move data only once its last rank has entered it. Durations suffice to find that
    rank, so no clocks are compared.

    transfer_us  time that the last rank spent in the call, summed over calls
    waiting_us   time that ranks spent beyond that: mean over ranks, summed over calls
    bus_bytes_per_s  bus bandwidth of the transfer, as nccl-tests derives it; 0 if the size or the
                     group is unknown
    last         the rank that made the others wait longest
    last_calls   the number of calls in which it came last
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
    """How one rank waited for others and made others wait, over all collective calls.

    made_wait_us  mean over the other ranks
    most_in       the work in which it exceeded the other ranks' mean the most: a kind in a range,
                  or idle time
    excess_us     by how much
    """

    rank: int
    waited_us: float
    made_wait_us: float
    calls_last: int
    most_in: str
    excess_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossRanks:
    """The combined analysis of several ranks' traces."""

    collectives: list[SharedCollective]
    stragglers: list[Straggler]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum of several cells, per step."""

    calls: float = 0.0
    us: float = 0.0
    busy_us: float = 0.0
    idle_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


def total(cells: Iterable[Cell], steps: int) -> Sum:
    """Returns the sum of the cells, divided by the number of steps."""
    cells = list(cells)
    names = [field.name for field in dataclasses.fields(Sum)]
    return Sum(**{name: sum(getattr(cell, name) for cell in cells) / steps for name in names})


def sums_by(analysis: Analysis, *fields: str) -> dict[tuple[str, ...], Sum]:
    """Groups the cells by these fields and returns the sum of each group, longest time first."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in analysis.cells:
        groups[tuple(getattr(cell, name) for name in fields)].append(cell)
    sums = {values: total(cells, analysis.steps) for values, cells in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].us))
