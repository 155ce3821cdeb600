"""E2: where the time of a step goes, by kind of work, phase and part of the model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgauge.report.names import describe
from stepgauge.report.page import Block
from stepgauge.report.profile import blocks as profile_blocks
from stepgauge.report.profile_page import METHOD, read
from stepgauge.report.table import Table
from stepgauge.report.views import record_table
from stepgauge.spec.analysis import Analysis, Cell
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import legend
from stepgauge.study.sizes import OURS, S1, S2, sizes

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job

# What S1 and S5 say of their profiles: (source, figure, value).
PUBLISHED = (
    ("S1", "matmul, share of a forward", "82 %"),
    ("S1", "matmul, share of a whole step", "71 %"),
    ("S1", "norm layers, share of a forward at xl", "2.5 %"),
    ("S1", "softmax, share of a forward at xl", "3.3 %"),
    ("S5", "softmax in one attention, against its matrix products", "800 µs against 762 µs"),
)
# Which cells of a profile each figure adds up.
FIGURES: Mapping[str, Callable[[Cell], bool]] = {
    "matmul": lambda cell: cell.kind == "matmul",
    "attention, fused": lambda cell: cell.kind == "attention",
    "softmax": lambda cell: cell.kind == "softmax",
    "norm layers, by range": lambda cell: "norm" in cell.range,
    "optimizer": lambda cell: cell.kind == "optimizer",
}


def specs(machine: StudyMachine, folder: Path) -> Sequence["Job"]:
    from stepgauge.bench.jobs import jobs_of

    return [job for spec in _specs(machine) for job in jobs_of(spec, folder / "profile")]


def _specs(machine: StudyMachine) -> list[ProfileSpec]:
    if not machine.is_gpu:
        return [_spec(machine, "tiny", S2, warmup=2, steps=5, seconds=0.5)]
    fit = sizes(machine)
    rows = [_spec(machine, size, S1) for size in dict.fromkeys((fit[0], fit[-1]))]
    return [*rows, _spec(machine, fit[-1], OURS, attention="sdpa", precision="bf16")]


def _spec(
    machine: StudyMachine,
    size: str,
    load: tuple[int, int],
    *,
    attention: str = "eager",
    **fields: Any,
) -> ProfileSpec:
    batch, context = load
    model = ModelSpec.preset(size, context_length=context, attention=attention)
    return ProfileSpec(model=model, size=size, batch=batch, device=machine.device, **fields)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [record_table([_timings(record) for record in records])]


def _timings(record: Record) -> Record:
    """The record without the shares of the kinds: tables of their own give them."""
    kept = {
        n: s
        for n, s in record.metrics.items()
        if n.startswith(("profil", "step", "forward", "backward", "opt"))
    }
    return dataclasses.replace(record, metrics=kept)


def pictures(records: Sequence[Record], folder: Path) -> Sequence[Block]:
    shown: list[Block] = []
    for record in records:
        found = read(record, folder / "profile")
        if found is None:
            continue
        name = describe(record).removeprefix("profile ")
        caption = f"Shares of the time in a forward and in the whole step: {name}"
        shares = Table(["kind", "forward %", "step %"], kinds_shares(found), caption=caption)
        shown += [shares, *profile_blocks(found)]
    return [published_table(), *shown] if shown else []


def kinds_shares(found: Analysis) -> list[tuple[str, float, float]]:
    """(figure, % of a forward, % of the step) of kinds of work, and of all norm layers."""
    forward = [cell for cell in found.cells if cell.phase == "forward"]
    return [
        (name, _percent(forward, wanted), _percent(found.cells, wanted))
        for name, wanted in FIGURES.items()
    ]


def _percent(cells: Sequence[Cell], wanted: Callable[[Cell], bool]) -> float:
    """Of the time of all cells, that of the wanted ones."""
    in_all = sum(cell.us for cell in cells)
    own = sum(cell.us for cell in cells if wanted(cell))
    return 100 * own / in_all if in_all else 0.0


def published_table() -> Table:
    """What S1 and S5 say of their profiles, and where they are from."""
    caption = f"What others published of their profiles. {legend(('S1', 'S5'))}."
    return Table(["source", "figure", "value"], PUBLISHED, caption=caption)


EXPERIMENT = Experiment(
    name="profile",
    title="Where the time goes",
    question="Which kernels, phases and parts of the model take the time of a step, and why does the device wait?",
    method=METHOD,
    specs=specs,
    blocks=blocks,
    pictures=pictures,
)
