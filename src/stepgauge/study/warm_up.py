"""Experiment: the error of a mean that is measured without warm-up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.figure import grouped_bars
from stepgauge.report.names import describe
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Table
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import legend
from stepgauge.study.sizes import step_spec

WARM_UPS = (0, 1, 2, 5)
# S1's small: forward 84 ms without warm-up, 19 with one step; S2's small: 29 ± 52 against 12.9 ±
# 0.3 ms.
_FIGURES: list[tuple[str, int, float, float | None]] = [
    ("S1", 0, 84, None),
    ("S1", 1, 19, None),
    ("S2", 0, 29, 52),
    ("S2", 5, 12.9, 0.3),
]


def specs(machine: StudyMachine, folder: Path) -> Sequence[StepSpec]:
    size = "small" if machine.is_gpu else "tiny"
    return [step_spec(machine, size, warmup=warmup, seconds=0.0) for warmup in WARM_UPS]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = [record for record in records if record.status == "ok"]
    if not good:
        return [record_table(records)]
    names = [f"warm-up {record.spec['warmup']}" for record in good]
    forward = [record.metrics["forward_ms"] for record in good]
    svg = grouped_bars(
        names,
        {"mean": [s.mean for s in forward], "median": [s.median for s in forward]},
        unit="ms a forward pass",
    )
    rows: list[list[Any]] = []
    for record, sample in zip(good, forward, strict=True):
        figures = [sample.mean, sample.std, sample.median]
        rows.append([record.spec["warmup"], *figures, "this machine"])
    for source, warmup, mean, std in _FIGURES:
        rows.append([warmup, mean, std, None, source])
    head = ["warm-up steps", "forward ms mean", "std", "median", "source"]
    caption = f"Comparison with published figures for size small. {legend(('S1', 'S2'))}."
    table = Table(head, rows, names=1, caption=caption)
    least, most = min(sample.n for sample in forward), max(sample.n for sample in forward)
    counts = f"{least}" if least == most else f"{least} to {most}"
    return [
        Plot(svg, f"Mean and median over {counts} forward passes, {describe(good[0])}."),
        table,
    ]


def answer(records: Sequence[Record]) -> str:
    """Compares the mean without warm-up with the median after the longest warm-up."""
    by_warm_up = {r.spec["warmup"]: r.metrics["forward_ms"] for r in records if r.status == "ok"}
    if len(by_warm_up) < 2:
        return ""
    cold, warm = by_warm_up[min(by_warm_up)], by_warm_up[max(by_warm_up)]
    return (
        f"Without warm-up, the mean of {cold.n} forward passes is {number(cold.mean)} ms: "
        f"{cold.mean / warm.median:.1f} times the median after {max(by_warm_up)} warm-up steps "
        f"({number(warm.median)} ms). The median without warm-up is {number(cold.median)} ms."
    )


EXPERIMENT = Experiment(
    name="warm-up",
    title="Warm-up",
    question="How wrong is a mean that includes the first steps of a process?",
    method=(
        "The same row is measured after 0, 1, 2 and 5 untimed steps, each time in a new process, in "
        "which no kernel is loaded yet, no algorithm chosen and no memory pool grown."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
)
