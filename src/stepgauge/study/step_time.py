"""Experiment: step time by size and phase."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.names import flatten
from stepgauge.report.page import Block
from stepgauge.report.step_plots import phase_bars
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import SWIGLU, comparison, published
from stepgauge.study.sizes import DEFAULT_LOAD, GPU_SIZES, S1_LOAD, S2_LOAD, sizes, step_spec

EXPERIMENT_NAME = "step-time"


def specs(machine: StudyMachine, folder: Path) -> Sequence[StepSpec]:
    loads = (DEFAULT_LOAD, S1_LOAD, S2_LOAD) if machine.is_gpu else (S2_LOAD,)
    shown = sizes(machine)
    rows = [step_spec(machine, size, load=load) for load in loads for size in shown]
    if machine.is_gpu and len(shown) < len(GPU_SIZES):
        # The first size that does not fit is included, and its row says so.
        rows.append(step_spec(machine, GPU_SIZES[len(shown)]))
    return rows


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    shown: list[Block] = []
    scale_end = max((record.median("step_ms") or 0.0 for record in records), default=0.0)
    for load in dict.fromkeys(map(_load, records)):
        rows = [record for record in records if _load(record) == load]
        names = [str(record.spec["size"]) for record in rows]
        caption = f"Step time by size and phase, fp32, batch × context {load}."
        points = _published_totals(load, names)
        shown.append(phase_bars(rows, names, caption, points=points, scale_end=scale_end))
    shown.append(record_table(records))
    return [*shown, comparison(EXPERIMENT_NAME, records, SWIGLU)]


def _published_totals(load: str, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Returns forward + backward of each source that published this batch and context, by size."""
    totals: dict[str, dict[str, float]] = {}
    for row in published(EXPERIMENT_NAME):
        if "batch" in row.spec and _load(row) == load:
            both = sum(sample.median for sample in row.metrics.values())
            totals.setdefault(row.source, {})[row.spec["size"]] = both
    return {
        f"{source} forward + backward": [sizes.get(name) for name in names]
        for source, sizes in totals.items()
    }


def _load(record: Record) -> str:
    spec = flatten(record.spec)
    return f"{spec['batch']} × {spec['context_length']}"


EXPERIMENT = Experiment(
    name=EXPERIMENT_NAME,
    title="Step time",
    question="How long do forward, backward and optimizer take, and how does that grow with the model?",
    method=(
        "Each row runs in its own process, which builds the model, warms up and then times n steps. "
        "On a GPU, events on the device's queue mark the phase boundaries, and the host waits once "
        "at the end of each step. On a CPU the clock is perf_counter. Forward includes the loss. "
        "Figures are medians, with p10 and p90."
    ),
    specs=specs,
    blocks=blocks,
)
