"""Compares the terms of a predicted step with the kernels of a trace, part by part."""

import dataclasses
from collections.abc import Iterable, Sequence

from stepgauge.report.kernel_names import short_name
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis, Cell
from stepgauge.spec.calibration import LAUNCH_GAP, kernel_class
from stepgauge.spec.record import Record
from stepgauge.trace.names import readable

# One part, because autograd adds up the residual stream's gradients when it leaves a norm.
STREAM = "norms and residual sums"
# The part that a term belongs to, if it is not named like the term.
PARTS = {
    "attention.norm": STREAM,
    "feed_forward.norm": STREAM,
    "head.norm": STREAM,
    "residual": STREAM,
    "attention.rotation_and_split": "attention",
    "attention.rotation": "attention",
    "feed_forward.up": "feed_forward.gate_up",
    "feed_forward.gate": "feed_forward",
    "feed_forward.gelu": "feed_forward",
}
# The part that a range of the trace belongs to, without the block's name.
RANGES = {
    "": STREAM,
    "attention_norm": STREAM,
    "feed_forward_norm": STREAM,
    "norm": STREAM,
    "attention.rotation": "attention",
}
LAYERS = ("attention", "feed_forward")
WAITS = "waits"  # the device is idle
# Kernel classes by the kind of a trace's cells; all other kinds are "traffic".
KINDS = {
    "matmul": "matmul",
    "convolution": "matmul",
    "attention": "attention",
    "optimizer": "update",
}


@dataclasses.dataclass
class Part:
    """Milliseconds per step of one part of the network, in one phase and one class of kernels.

    launches  of traced kernels, per step
    kernels   traced kernels: microseconds by name, over all steps
    """

    phase: str
    part: str
    kind: str
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    launches: float = 0.0
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def longest(self) -> str:
        return max(self.kernels, key=lambda name: self.kernels[name], default="")


def compare_parts(prediction: Record, trace: Analysis) -> list[Part]:
    """Returns the parts with their predicted and measured time, the most wrong first.

    Parts of the network are told apart only if both sides name them. The trace of a compiled step has
    no ranges, and the prediction of a network without formulas has operators instead of modules.
    """
    _, *rows = prediction.tables["terms"]
    has_parts = any(cell.range.startswith("blocks") for cell in trace.cells) and any(
        part_of(term).startswith(LAYERS) for _, term, *_ in rows
    )
    parts: dict[tuple[str, str, str], Part] = {}

    def of(phase: str, part: str, kind: str) -> Part:
        part = part if has_parts and phase != "optimizer" and kind != WAITS else ""
        return parts.setdefault((phase, part, kind), Part(phase, part, kind))

    for phase, term, operation, _sizes, _count, us, *_ in rows:
        kind = WAITS if term == "host" or operation == LAUNCH_GAP else kernel_class(operation)
        of(phase, part_of(term), kind).predicted_ms += us / 1e3
    for cell in _on_device(trace.cells):
        module = cell.range.removeprefix("blocks.*").removeprefix(".")
        part = of(cell.phase, RANGES.get(module, module), KINDS.get(cell.kind, "traffic"))
        part.measured_ms += cell.us / 1e3 / trace.steps
        part.launches += cell.calls / trace.steps
        name = readable(cell.name)
        part.kernels[name] = part.kernels.get(name, 0.0) + cell.us
    for idle in trace.idle:
        if idle.phase:
            of(idle.phase, "", WAITS).measured_ms += idle.us / 1e3 / trace.steps
    return sorted(parts.values(), key=lambda part: -abs(part.predicted_ms - part.measured_ms))


def part_of(term: str) -> str:
    """Returns the module that runs a term, without the block's number."""
    term = term.removeprefix("recomputed.")
    for name, part in PARTS.items():
        if term == name or term.startswith(f"{name}."):
            return part
    names = term.split(".")
    has_layer = names[0] in LAYERS and len(names) > 1
    return ".".join(names[:2]) if has_layer else names[0]


def _on_device(cells: Iterable[Cell]) -> Iterable[Cell]:
    return (cell for cell in cells if cell.phase and cell.calls and cell.kind != "host")


def comparison_table(prediction: Record, trace: Analysis) -> Table:
    """Returns a row per part, the most wrong first. The differences add up to that of the step.

    Raises ValueError for a trace without kernels.
    """
    parts = compare_parts(prediction, trace)
    predicted, measured = _totals(parts)
    kernels_predicted, kernels_measured = _totals([p for p in parts if p.kind != WAITS])
    if not kernels_measured:
        raise ValueError("the trace has no kernels to compare with the prediction")
    rows = []
    for part in parts:
        difference = part.predicted_ms - part.measured_ms
        rows.append({
            "phase": part.phase,
            "part": part.part,
            "kernels": part.kind,
            "predicted ms": part.predicted_ms,
            "traced ms": part.measured_ms,
            "difference": difference,
            "of the step": difference / measured,
            "calls per step": part.launches,
            "longest kernel": short_name(part.longest, 48),
        })  # fmt: skip
    caption = (
        f"The prediction from {prediction.environment['hardware']} compared with the kernels of the "
        f"trace: {predicted:.1f} ms predicted, {measured:.1f} ms traced, "
        f"{predicted / measured - 1:+.1%}."
    )
    if kernels_measured < measured:
        caption += (
            f" Without waits, which the profiler lengthens: {kernels_predicted:.1f} and "
            f"{kernels_measured:.1f} ms, {kernels_predicted / kernels_measured - 1:+.1%}."
        )
    return Table.from_rows(rows, names=3, formats={"of the step": "+.1%"}, caption=caption)


def _totals(parts: Sequence[Part]) -> tuple[float, float]:
    """Returns the predicted and the measured milliseconds of all parts."""
    return sum(part.predicted_ms for part in parts), sum(part.measured_ms for part in parts)
