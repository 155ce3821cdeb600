"""E1: what a step takes, by size and phase."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.bench.sweep import Job
from stepgauge.report.figure import stacked_bars
from stepgauge.report.names import flatten
from stepgauge.report.page import Block, Plot
from stepgauge.report.views import plotted, record_table
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.published import CONDITIONS, beside, published
from stepgauge.study.sizes import GPU_SIZES, OURS, S1, S2, sizes, step_job

# Forward and backward of fp32, in ms.
_FIGURES: dict[str, dict[str, tuple[float, float]]] = {
    "S1": {
        "small": (18.8, 34.0),
        "medium": (45, 85),
        "large": (96, 191),
        "xl": (185, 359),
        "2.7b": (257, 534),
    },
    "S2": {"small": (12.9, 23.2), "medium": (31.9, 71.4), "large": (66.2, 143.5)},
    "S5": {"small": (31.5, 67), "medium": (97.7, 202)},
}
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


def jobs(machine: Machine, folder: Path) -> Sequence[Job]:
    loads = (OURS, S1, S2) if machine.is_gpu else (S2,)
    shown = sizes(machine)
    jobs = [step_job(machine, size, load=load) for load in loads for size in shown]
    beyond = (
        [step_job(machine, GPU_SIZES[len(shown)])]
        if machine.is_gpu and len(shown) < len(GPU_SIZES)
        else []
    )
    return jobs + beyond  # the first size that does not fit is a row that says so


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    shown: list[Block] = []
    most = max((record.median("step_ms") or 0.0 for record in records), default=0.0)
    for load in dict.fromkeys(map(_load, records)):
        rows = [record for record in records if _load(record) == load]
        names = [str(record.spec["size"]) for record in rows]
        phases = {
            p: [record.median(f"{p}_ms") for record in rows]
            for p in ("forward", "backward", "optimizer")
        }
        svg = stacked_bars(
            names,
            phases,
            totals=[plotted(record, "step_ms") for record in rows],
            unit="ms a step (medians)",
            points=_published_totals(load, names),
            most=most,
        )
        shown.append(Plot(svg, f"Step time by size and phase, fp32, batch × context {load}."))
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
    jobs=jobs,
    blocks=blocks,
)
