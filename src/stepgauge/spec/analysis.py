"""What a trace was found to say: plain figures, from which every table and picture of a profile is
a view.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

SCHEMA = 1
# Of work, in the order of a timeline's lanes.
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
)


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
    """All calls of one operation with equal shapes. `flops` and `bytes` are of one call; 0: no
    formula is known.
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
    """Times in which the device stood still, by why."""

    reason: str
    phase: str
    gaps: int
    us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication of one rank: how long, and how much of it was hidden behind computing."""

    rank: int | None
    communication_us: float
    computation_us: float
    hidden_us: float
    exposed_us: float

    @property
    def ratio(self) -> float:
        return self.hidden_us / self.communication_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the machine reached in the same process: the roofline's two lines."""

    flop_per_s: float
    bytes_per_s: float
    condition: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """One rank's trace.

    source      the file
    on_device   kernels of a device; else operations of the host, each by what it did itself
    steps       how many steps were profiled
    phases_us   phase -> one value a step; on a device by its own time line, on a CPU on the host's
    stopwatch_ms  phase -> milliseconds without the profiler, where they were taken; "step" is the
                  whole
    watched_ms    phase -> one value a step: the same stopwatch in the profiled steps themselves
    lanes       kind -> [start, end] pairs in µs from the step's begin, of the last step
    marks       [phase, start µs, end µs] of the last step
    flame       nested [name, µs itself, children], all steps together
    """

    source: str
    rank: int | None = None
    device: str = ""
    on_device: bool = False
    steps: int = 1
    phases_us: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    operations: list[OperationRow] = dataclasses.field(default_factory=list)
    idle: list[Idle] = dataclasses.field(default_factory=list)
    overlap: Overlap | None = None
    ceilings: Ceilings | None = None
    stopwatch_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    watched_ms: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    lanes: Mapping[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    marks: list[list[Any]] = dataclasses.field(default_factory=list)
    flame: list[Any] = dataclasses.field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError for text that is no analysis of this schema."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
            raise ValueError(f"not an analysis of schema {SCHEMA}")
        try:
            for name, row in (("cells", Cell), ("operations", OperationRow), ("idle", Idle)):
                value[name] = [row(**fields) for fields in value[name]]
            for name, part in (("overlap", Overlap), ("ceilings", Ceilings)):
                value[name] = part(**value[name]) if value[name] else None
            return cls(**value)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an analysis: {error}") from None
