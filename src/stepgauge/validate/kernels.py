"""The terms of a predicted step beside the kernels that a trace shows for them."""

import dataclasses
from collections.abc import Iterable

from stepgauge.report.kernel_names import short_name
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis, Cell
from stepgauge.spec.calibration import kernel_class
from stepgauge.spec.record import Record
from stepgauge.trace.names import readable

STREAM = "norms and residual sums"  # of gradients autograd makes the sums as it leaves a norm
# The part of a term, where it is not the term's own name.
PARTS = {
    "attention.norm": STREAM,
    "feed_forward.norm": STREAM,
    "head.norm": STREAM,
    "residual": STREAM,
    "attention.heads": "attention",
    "attention.rotation": "attention",
    "feed_forward.up": "feed_forward.gate_up",
    "feed_forward.gate": "feed_forward",
    "feed_forward.gelu": "feed_forward",
}
# The part of a range of the trace, without the block.
RANGES = {
    "": STREAM,
    "attention_norm": STREAM,
    "feed_forward_norm": STREAM,
    "norm": STREAM,
    "attention.rotation": "attention",
}
LAYERS = ("attention", "feed_forward")
WAITS = "waits"  # the device stands still
KINDS = {
    "matmul": "matmul",
    "convolution": "matmul",
    "attention": "attention",
}  # of cells, as kernel_class names them


@dataclasses.dataclass
class Part:
    """Milliseconds a step of a part of the network in one phase, of one class of kernels.

    kernels  that the trace has for it: launches a step, and milliseconds by name
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


def parts_beside(prediction: Record, found: Analysis) -> list[Part]:
    """Each part's terms and kernels: by phase and class alone where a trace has no ranges, as of a
    compiled step, and where operators were predicted, as of a network without formulas.
    """
    _, *rows = prediction.tables["terms"]
    has_parts = any(cell.range.startswith("blocks") for cell in found.cells) and any(
        part_of(term).startswith(LAYERS) for _, term, *_ in rows
    )
    parts: dict[tuple[str, str, str], Part] = {}

    def of(phase: str, part: str, kind: str) -> Part:
        part = part if has_parts and phase != "optimizer" and kind != WAITS else ""
        return parts.setdefault((phase, part, kind), Part(phase, part, kind))

    for phase, term, operation, *_, us, _source in rows:
        kind = WAITS if term == "host" else kernel_class(operation)
        of(phase, part_of(term), kind).predicted_ms += us / 1e3
    for cell in _on_device(found.cells):
        place = cell.range.removeprefix("blocks.*").removeprefix(".")
        own = of(cell.phase, RANGES.get(place, place), KINDS.get(cell.kind, "traffic"))
        own.measured_ms += cell.us / 1e3 / found.steps
        own.launches += cell.calls / found.steps
        name = readable(cell.name)
        own.kernels[name] = own.kernels.get(name, 0.0) + cell.us
    for idle in found.idle:
        if idle.phase:
            of(idle.phase, "", WAITS).measured_ms += idle.us / 1e3 / found.steps
    return sorted(parts.values(), key=lambda each: -abs(each.predicted_ms - each.measured_ms))


def part_of(term: str) -> str:
    """The module that runs the term, without the block's number."""
    term = term.removeprefix("recomputed.")
    for name, part in PARTS.items():
        if term == name or term.startswith(f"{name}."):
            return part
    names = term.split(".")
    has_layer = names[0] in LAYERS and len(names) > 1
    return ".".join(names[:2]) if has_layer else names[0]


def _on_device(cells: Iterable[Cell]) -> Iterable[Cell]:
    return (cell for cell in cells if cell.phase and cell.calls and cell.kind != "host")


def kernels_beside(prediction: Record, found: Analysis) -> Table:
    """A row a part, the most wrong first; their differences add up to that of the step. Raises
    ValueError for a trace without kernels.
    """
    parts = parts_beside(prediction, found)
    predicted = sum(part.predicted_ms for part in parts)
    measured = sum(part.measured_ms for part in parts)
    if not measured:
        raise ValueError("the trace has no kernels to set beside what was predicted")
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
            "calls a step": part.launches,
            "longest kernel": short_name(part.longest, 48),
        })  # fmt: skip
    caption = (
        f"What was predicted from {prediction.environment['hardware']} beside the kernels of the "
        f"trace: {predicted:.1f} ms for {measured:.1f}, {predicted / measured - 1:+.1%}."
    )
    return Table.from_rows(rows, names=3, formats={"of the step": "+.1%"}, caption=caption)
