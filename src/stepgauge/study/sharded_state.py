"""E10: optimizer state, gradients and weights sharded over ranks: ZeRO stages 1, 2 and 3."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.figure import stacked_bars
from stepgauge.report.findings import is_comparable
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Table
from stepgauge.report.views import plotted
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB
from stepgauge.study import data_parallel
from stepgauge.study.data_parallel import row_of
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import beside

PLAIN = "bucketed"
WRAPPERS = (PLAIN, "zero1", "torch-zero1", "zero2", "zero3", "torch-fsdp")
PARTS = ("parameter", "gradient", "optimizer", "rest")
# of the table, in GiB
COLUMNS = {
    **{name: f"{name.replace('_', ' ')} GiB" for name in ("initial", "before_update", "after_update", "peak")},
    "parameter": "parameters GiB", "gradient": "gradients GiB", "optimizer": "optimizer GiB", "rest": "rest GiB",
}  # fmt: skip


def specs(machine: StudyMachine, folder: Path) -> Sequence[DataParallelSpec]:
    """Those of data parallel training: what both ask is measured once."""
    asked = data_parallel.specs(machine, folder)
    usual = [
        spec
        for spec in asked
        if spec.bucket_mb == DataParallelSpec.bucket_mb and spec.reduce_dtype == "own"
    ]
    return [spec for spec in usual if spec.wrapper in WRAPPERS]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = [record for record in records if record.status == "ok"]
    return [
        *_picture(good),
        _memory(good),
        beside("sharded-state", good, "S1's sharded optimizer stands at zero1"),
    ]


def answer(records: Sequence[Record]) -> str:
    """What each stage keeps of the plain wrapper's state, and what its step costs."""
    good = [r for r in records if r.status == "ok" and is_comparable(r)]
    plain = max((r for r in good if r.spec["wrapper"] == PLAIN), key=_kept, default=None)
    if plain is None or not _kept(plain):
        return ""
    told = []
    for stage in ("zero1", "zero2", "zero3"):
        sharded = row_of(good, stage, str(plain.spec["size"]))
        if sharded:
            time = (sharded.median("step_ms") or 0.0) / (plain.median("step_ms") or 1.0)
            kept = _kept(sharded) / _kept(plain)
            told.append(f"{stage} keeps {kept:.2f} of the bytes and takes {time:.2f} of the step")
    return f"Beside {PLAIN} at size={plain.spec['size']}: {'; '.join(told)}."


def _kept(record: Record) -> float:
    """Bytes of parameters, gradients and optimizer state on a rank."""
    kept = (f"{part}_bytes" for part in PARTS[:3])
    return sum(record.median(name) or 0.0 for name in kept)


def _picture(records: Sequence[Record]) -> list[Block]:
    largest = [record for record in records if record.spec["size"] == records[-1].spec["size"]]
    if not largest or "optimizer_bytes" not in largest[0].metrics:
        return []
    parts = {part: [_gib(record, part) for record in largest] for part in PARTS}
    if "peak_bytes" in largest[0].metrics:
        what, totals = "Peak memory", [_gib(record, "peak") for record in largest]
    else:  # on a CPU only what a step keeps is known
        del parts[PARTS[-1]]
        what = "Memory of what a step keeps"
        totals = [sum(filter(None, each)) for each in zip(*parts.values(), strict=True)]
    names = [str(record.spec["wrapper"]) for record in largest]
    svg = stacked_bars(names, parts, totals=totals, unit="GiB a rank")
    return [Plot(svg, f"{what} of {largest[0].spec['size']} by part.")]


def _gib(record: Record, part: str) -> float | None:
    value = record.median(f"{part}_bytes")
    return None if value is None else value / GIB


def _memory(records: Sequence[Record]) -> Table:
    """Each moment and each part, and of the state how far the fullest rank is from an even share."""
    rows = []
    for record in records:
        plain = row_of(records, PLAIN, record.spec["size"])
        whole, state = (r.median("optimizer_bytes") if r else None for r in (plain, record))
        ranks = record.spec["ranks"] if record.spec["wrapper"] != PLAIN else 1
        over = 100 * (state * ranks / whole - 1) if whole and state else None
        rows.append({
            "size": record.spec["size"],
            "wrapper": record.spec["wrapper"],
            "step ms": plotted(record, "step_ms"),
            **{text: _gib(record, name) for name, text in COLUMNS.items()},
            "state over an even share %": over,
        })  # fmt: skip
    formats = {"state over an even share %": "+.2f"}
    return Table.from_rows(rows, caption="Memory of the fullest rank.", formats=formats)


EXPERIMENT = Experiment(
    name="sharded-state",
    title="Sharded optimizer state",
    question="What does each stage of ZeRO free on a rank, and what does it cost a step?",
    method=(
        "The rows of data parallel training with the usual buckets. Memory is that of tensors: "
        "after the first build, before and after the update, and at the peak, taken apart into "
        "parameters, gradients before the update, optimizer state and the rest. An even share is "
        "the plain wrapper's state over the ranks."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="two processes of one CPU, not two GPUs: bytes are right, times are not a GPU's",
)
