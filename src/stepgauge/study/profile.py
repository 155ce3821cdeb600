"""Experiment: the time of a step by kind of work, phase and module."""

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
from stepgauge.study.sizes import DEFAULT_LOAD, S1_LOAD, S2_LOAD, sizes

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job

# Published profiles: (source, figure, value).
PUBLISHED = (
    ("S1", "matmul, share of a forward", "82 %"),
    ("S1", "matmul, share of a whole step", "71 %"),
    ("S1", "norm layers, share of a forward at xl", "2.5 %"),
    ("S1", "softmax, share of a forward at xl", "3.3 %"),
    ("S5", "softmax in one attention, against its matrix products", "800 µs against 762 µs"),
)
# The cells of a profile that each figure adds up.
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
        return [_spec(machine, "tiny", S2_LOAD, warmup=2, steps=5, seconds=0.5)]
    fit = sizes(machine)
    rows = [_spec(machine, size, S1_LOAD) for size in dict.fromkeys((fit[0], fit[-1]))]
    return [*rows, _spec(machine, fit[-1], DEFAULT_LOAD, attention="sdpa", precision="bf16")]


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
    """Returns the record without its kinds of work, which have their own tables."""
    kept = {
        n: s
        for n, s in record.metrics.items()
        if n.startswith(("profil", "step", "forward", "backward", "opt"))
    }
    return dataclasses.replace(record, metrics=kept)


def pictures(records: Sequence[Record], folder: Path) -> Sequence[Block]:
    shown: list[Block] = []
    for record in records:
        analysis = read(record, folder / "profile")
        if analysis is None:
            continue
        name = describe(record).removeprefix("profile ")
        caption = f"Shares of the time of forward and of the whole step: {name}"
        shares = Table(["kind", "forward %", "step %"], kinds_shares(analysis), caption=caption)
        shown += [shares, *profile_blocks(analysis)]
    return [published_table(), *shown] if shown else []


def kinds_shares(analysis: Analysis) -> list[tuple[str, float, float]]:
    """Returns (figure, % of forward, % of the step) for kinds of work and for all norm layers."""
    forward = [cell for cell in analysis.cells if cell.phase == "forward"]
    return [
        (name, _percent(forward, is_part), _percent(analysis.cells, is_part))
        for name, is_part in FIGURES.items()
    ]


def _percent(cells: Sequence[Cell], is_part: Callable[[Cell], bool]) -> float:
    """Returns the share of the time of the cells for which `is_part` is true."""
    total = sum(cell.us for cell in cells)
    part = sum(cell.us for cell in cells if is_part(cell))
    return 100 * part / total if total else 0.0


def published_table() -> Table:
    """Returns the figures of published profiles and their sources."""
    caption = f"Published profiles, for comparison. {legend(('S1', 'S5'))}."
    return Table(["source", "figure", "value"], PUBLISHED, caption=caption)


EXPERIMENT = Experiment(
    name="profile",
    title="Where the time goes",
    question="Which kernels, phases and modules take the time of a step, and why is the device idle?",
    method=METHOD,
    specs=specs,
    blocks=blocks,
    pictures=pictures,
)
