"""E6: what torch.compile gains, and what it costs once."""

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
from stepgauge.study.published import SWIGLU, beside
from stepgauge.study.sizes import S1, sizes, step_spec

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
    return ours + [step_spec(machine, s, load=S1, compile=m) for s in fit[:2] for m in MODES]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    caption = (
        "The same step, eager and compiled. Compile time is not in it; the table gives it apart."
    )
    return [
        step_bars(records, caption, row=_row, bar=lambda record: MODES[record.spec["compile"]]),
        record_table(records),
        beside("compile", records, SWIGLU),
    ]


def answer(records: Sequence[Record]) -> str:
    """What compiling gains, and after how many steps it has paid for itself."""
    said = [choice_answer(records, "compile")]
    found = pairs(records, {"compile": "off"})
    costs = [(p, p.after.median("compile_s")) for p in found if p.saved_ms > 0]
    if known := [(pair, cost) for pair, cost in costs if cost]:
        pair, cost = max(known, key=lambda each: each[0].saved_ms)
        said.append(
            f"Compiling takes {number(cost)} s once at {_row(pair.after)}, which "
            f"{1e3 * cost / pair.saved_ms:,.0f} steps pay back."
        )
    return " ".join(said)


def _row(record: Record) -> str:
    spec = flatten(record.spec)
    return f"{spec['size']} {spec['precision']}, {spec['batch']} × {spec['context_length']}"


EXPERIMENT = Experiment(
    name="compile",
    title="torch.compile",
    question="What does compiling the whole model gain a step, and how long does it take once?",
    method=(
        "The model and its loss are compiled as one; the optimizer is torch's fused one in both. "
        "compile s is the first step's time less an ordinary step's, with whatever compiler cache "
        "the machine has."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs,
)
