"""Experiment: the speedup of torch.compile and the time of compilation."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.answers import choice_answer
from stepgauge.report.findings import pairs
from stepgauge.report.names import flatten
from stepgauge.report.numbers import number
from stepgauge.report.page import Block
from stepgauge.report.step_plots import step_bars
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import SWIGLU, comparison
from stepgauge.study.sizes import S1_LOAD, sizes, step_spec

MODES = {"off": "eager", "on": "compiled"}


def needs(machine: StudyMachine) -> str | None:
    return (
        None
        if machine.has_compiler
        else "torch.compile needs a C++ compiler, and none is on the path"
    )


def specs(machine: StudyMachine, folder: Path) -> Sequence[StepSpec]:
    if not machine.is_gpu:
        return [step_spec(machine, "tiny", compile=mode) for mode in MODES]
    fit = sizes(machine)
    ends = list(dict.fromkeys((fit[0], fit[-1])))
    ours = [step_spec(machine, s, precision="bf16", compile=m) for s in ends for m in MODES]
    return ours + [step_spec(machine, s, load=S1_LOAD, compile=m) for s in fit[:2] for m in MODES]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    caption = (
        "Step time, eager and compiled. The time of compilation is not included; the table has it."
    )
    return [
        step_bars(records, caption, row=_row, bar=lambda record: MODES[record.spec["compile"]]),
        record_table(records),
        comparison("compile", records, SWIGLU),
    ]


def answer(records: Sequence[Record]) -> str:
    """Returns the speedup, and the number of steps after which compilation pays off."""
    sentences = [choice_answer(records, "compile")]
    compared = pairs(records, {"compile": "off"})
    costs = [(p, p.after.median("compile_s")) for p in compared if p.saved_ms > 0]
    if measured := [(pair, cost) for pair, cost in costs if cost]:
        pair, cost = max(measured, key=lambda each: each[0].saved_ms)
        sentences.append(
            f"Compilation takes {number(cost)} s for {_row(pair.after)}, which pays off after "
            f"{1e3 * cost / pair.saved_ms:,.0f} steps."
        )
    return " ".join(sentences)


def _row(record: Record) -> str:
    spec = flatten(record.spec)
    return f"{spec['size']} {spec['precision']}, {spec['batch']} × {spec['context_length']}"


EXPERIMENT = Experiment(
    name="compile",
    title="torch.compile",
    question="How much faster is a step of the compiled model, and how long does compilation take?",
    method=(
        "The model and its loss are compiled together. Both rows use torch's fused optimizer. "
        "'compile s' is the time of the first step minus that of an ordinary step; a compiler cache "
        "on the machine is used if there is one."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs,
)
