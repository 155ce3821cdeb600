"""E1: what a step takes, by size and phase."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.names import flatten
from stepgauge.report.page import Block
from stepgauge.report.step_plots import phase_bars
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.published import CONDITIONS, beside, published
from stepgauge.study.sizes import GPU_SIZES, OURS, S1, S2, sizes, step_spec

# Forward and backward of fp32, in ms.
_FIGURES: dict[str, dict[str, tuple[float, float]]] = {
    "S1": {"small": (18.8, 34.0), "medium": (45, 85), "large": (96, 191), "xl": (185, 359),
           "2.7b": (257, 534)},
    "S2": {"small": (12.9, 23.2), "medium": (31.9, 71.4), "large": (66.2, 143.5)},
    "S5": {"small": (31.5, 67), "medium": (97.7, 202)},
}  # fmt: skip
PUBLISHED = [
    published(
        source,
        spec={"size": size, "precision": "fp32", "compile": "off"},
        forward=forward,
        backward=backward,
    )
    for source, rows in _FIGURES.items()
    for size, (forward, backward) in rows.items()
]


def specs(machine: Machine, folder: Path) -> Sequence[StepSpec]:
    loads = (OURS, S1, S2) if machine.is_gpu else (S2,)
    shown = sizes(machine)
    rows = [step_spec(machine, size, load=load) for load in loads for size in shown]
    if machine.is_gpu and len(shown) < len(GPU_SIZES):
        # the first size that does not fit is a row that says so
        rows.append(step_spec(machine, GPU_SIZES[len(shown)]))
    return rows


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    shown: list[Block] = []
    most = max((record.median("step_ms") or 0.0 for record in records), default=0.0)
    for load in dict.fromkeys(map(_load, records)):
        rows = [record for record in records if _load(record) == load]
        names = [str(record.spec["size"]) for record in rows]
        caption = f"Step time by size and phase, fp32, batch × context {load}."
        points = _published_totals(load, names)
        shown.append(phase_bars(rows, names, caption, points=points, most=most))
    shown.append(record_table(records))
    return [*shown, beside(records, PUBLISHED, ("forward_ms", "backward_ms"))]


def _published_totals(load: str, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Forward and backward of the sources that were measured at this load."""
    totals = {
        source: {name: sum(times) for name, times in rows.items()}
        for source, rows in _FIGURES.items()
        if " × ".join(map(str, CONDITIONS[source].values())) == load
    }
    return {
        f"{source} forward + backward": [rows.get(n) for n in names]
        for source, rows in totals.items()
    }


def _load(record: Record) -> str:
    spec = flatten(record.spec)
    return f"{spec['batch']} × {spec['context_length']}"


EXPERIMENT = Experiment(
    name="step-time",
    title="Step time",
    question="What do forward, backward and optimizer take, and how does that grow with the model?",
    method=(
        "Each row runs in a process of its own: build, warm up, then time n steps. On a GPU, events mark the phase "
        "boundaries on the device's queue and the host waits once at the end of a step; on a CPU the clock is "
        "perf_counter. Forward includes the loss. Figures are medians, with p10 and p90."
    ),
    specs=specs,
    blocks=blocks,
)
