"""Experiment: one training step under layouts with different axes."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.layout import layout_answer, layout_blocks
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus

ON_TWO = ("none", "dp2 bucketed", "dp2 zero3", "tp2", "pp2 1f1b m4")
ON_FOUR = ("dp4 bucketed", "dp4 zero3", "tp4", "pp4 1f1b m8", "dp2 zero1 tp2", "pp2 1f1b m8 tp2")


def specs(machine: StudyMachine, folder: Path) -> Sequence[LayoutSpec]:
    layouts = ON_TWO + (ON_FOUR if machine.gpus >= 4 else ()) if machine.is_gpu else ON_TWO
    return [_spec(machine, layout) for layout in layouts]


def _spec(machine: StudyMachine, layout: str) -> LayoutSpec:
    if machine.is_gpu:
        return LayoutSpec(
            model=ModelSpec.preset("large", context_length=512), size="large", layout=layout,
            batch=16, precision="bf16", device="cuda",
        ).canonical()  # fmt: skip
    return LayoutSpec(
        model=ModelSpec.preset("nano", context_length=64), size="nano", layout=layout, batch=4,
        warmup=1, steps=5,
    ).canonical()  # fmt: skip


EXPERIMENT = Experiment(
    name="layout",
    title="Layouts",
    question="Which layout trains a network fastest, and how much time does each axis cost?",
    method=(
        "All layouts run the same step on the same global batch: forward, backward and optimizer. "
        "The slowest rank of each step counts. The cost of an axis is the step's time minus that of "
        "the same step without its communication. For a pipeline it is forward and backward minus "
        "the compute time of its busiest rank."
    ),
    specs=specs,
    blocks=layout_blocks,
    answer=layout_answer,
    needs=needs_two_gpus,
    on_cpu="the ranks are processes on one CPU, so two ranks have no more cores than one",
)
