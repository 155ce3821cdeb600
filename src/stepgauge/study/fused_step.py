"""Experiment: the whole step with our norm, attention, loss and optimizer, eager and compiled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.names import flatten
from stepgauge.report.numbers import number
from stepgauge.report.page import Block
from stepgauge.report.step_plots import step_bars
from stepgauge.report.table import Table
from stepgauge.report.views import plotted, record_table
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.sizes import needs_gpu, step_spec

OUR_PARTS = {"norm": "triton", "attention": "triton", "loss": "fused"}


def specs(machine: StudyMachine, folder: Path) -> Sequence[StepSpec]:
    modes = ("off", "on") if machine.has_compiler else ("off",)
    return [
        _spec(machine, size, ours=ours, precision="bf16", compile=mode)
        for size in ("small", "2.7b")
        for mode in modes
        for ours in (False, True)
    ]


def _spec(machine: StudyMachine, size: str, *, ours: bool, **fields: Any) -> StepSpec:
    stock = step_spec(machine, size, **fields)
    if not ours:
        return stock
    model = ModelSpec.preset(size, context_length=stock.network.context_length, **OUR_PARTS)
    return step_spec(machine, size, **fields, model=model, optimizer="fused")


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    rows = {(_size(record), _name(record)): plotted(record, "step_ms") for record in records}
    shown = []
    for (size, name), ms in rows.items():
        stock = [t for (s, n), t in rows.items() if s == size and n.startswith("stock") and t]
        speedup = min(stock) / ms if stock and ms else None
        shown.append({"size": size, "parts": name, "step ms": ms, "speedup": speedup})
    caption = (
        "Stock is torch's parts. The speedup is the time of the best stock row divided by the row's: "
        "above 1, the row is faster than the best that torch offers."
    )
    return [
        step_bars(records, "Step time with torch's parts and with ours.", row=_size, bar=_name),
        Table.from_rows(shown, caption=caption, formats={"speedup": ".3f"}),
        record_table(records),
    ]


def _size(record: Record) -> str:
    return str(record.spec["size"])


def answer(records: Sequence[Record]) -> str:
    """Returns our step time and the best stock one, by size."""
    times = {(_size(r), _name(r)): r.median("step_ms") for r in records}
    clauses = []
    for size in dict.fromkeys(size for size, _ in times):
        stock, ours = (
            [ms for (s, name), ms in times.items() if s == size and name.startswith(parts) and ms]
            for parts in ("stock", "ours")
        )
        if stock and ours:
            clauses.append(
                f"a step of {size} takes {number(min(ours))} ms with our parts and "
                f"{number(min(stock))} ms with the best of torch's, "
                f"{min(stock) / min(ours):.3f} times as fast"
            )
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _name(record: Record) -> str:
    spec = flatten(record.spec)
    parts = "ours" if spec["norm"] == OUR_PARTS["norm"] else "stock"
    compiled = {"off": "eager", "on": "compiled"}.get(spec["compile"], spec["compile"])
    return f"{parts}, {compiled}"


EXPERIMENT = Experiment(
    name="fused-step",
    title="The step with fused parts",
    question="Is a step with our norm, attention, loss and optimizer faster than the best that torch offers?",
    method="The rows differ only in these four parts and in torch.compile. Each row runs in its own process.",
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_gpu,
)
