"""Experiment: ZeRO stages 1, 2 and 3, which shard optimizer state, gradients and weights."""

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
from stepgauge.study.published import comparison

PLAIN = "bucketed"
WRAPPERS = (PLAIN, "zero1", "torch-zero1", "zero2", "zero3", "torch-fsdp")
PARTS = ("parameter", "gradient", "optimizer", "rest")
# Metrics, without their suffix _bytes, and headings of the table's columns.
COLUMNS = {
    **{name: f"{name.replace('_', ' ')} GiB" for name in ("initial", "before_update", "after_update", "peak")},
    "parameter": "parameters GiB", "gradient": "gradients GiB", "optimizer": "optimizer GiB", "rest": "rest GiB",
}  # fmt: skip


def specs(machine: StudyMachine, folder: Path) -> Sequence[DataParallelSpec]:
    """Some of the specs of the data-parallel experiment, so that each is measured once for both."""
    return [
        spec
        for spec in data_parallel.specs(machine, folder)
        if spec.wrapper in WRAPPERS
        and spec.bucket_mb == DataParallelSpec.bucket_mb
        and spec.reduce_dtype == "own"
    ]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = [record for record in records if record.status == "ok"]
    return [
        *_picture(good),
        _memory(good),
        comparison("sharded-state", good, "S1's sharded optimizer is compared with zero1"),
    ]


def answer(records: Sequence[Record]) -> str:
    """Returns the memory and step time of each ZeRO stage relative to the plain wrapper."""
    good = [r for r in records if r.status == "ok" and is_comparable(r)]
    plain = max((r for r in good if r.spec["wrapper"] == PLAIN), key=_kept, default=None)
    if plain is None or not _kept(plain):
        return ""
    clauses = []
    for stage in ("zero1", "zero2", "zero3"):
        sharded = row_of(good, stage, str(plain.spec["size"]))
        if sharded:
            time = (sharded.median("step_ms") or 0.0) / (plain.median("step_ms") or 1.0)
            kept = _kept(sharded) / _kept(plain)
            clauses.append(f"{stage} keeps {kept:.2f} × the bytes and takes {time:.2f} × the time")
    size = plain.spec["size"]
    return f"Relative to {PLAIN} at size={size}, {'; '.join(clauses)}." if clauses else ""


def _kept(record: Record) -> float:
    """Returns the bytes of parameters, gradients and optimizer state on a rank."""
    kept = (f"{part}_bytes" for part in PARTS[:3])
    return sum(record.median(name) or 0.0 for name in kept)


def _picture(records: Sequence[Record]) -> list[Block]:
    largest = [record for record in records if record.spec["size"] == records[-1].spec["size"]]
    if not largest or "optimizer_bytes" not in largest[0].metrics:
        return []
    parts = {part: [_gib(record, part) for record in largest] for part in PARTS}
    if "peak_bytes" in largest[0].metrics:
        title, totals = "Peak memory", [_gib(record, "peak") for record in largest]
    else:  # on a CPU, the peak of tensors is unknown
        del parts[PARTS[-1]]
        title = "Memory kept between steps"
        totals = [sum(filter(None, each)) for each in zip(*parts.values(), strict=True)]
    names = [str(record.spec["wrapper"]) for record in largest]
    svg = stacked_bars(names, parts, totals=totals, unit="GiB per rank")
    return [Plot(svg, f"{title} of {largest[0].spec['size']} by part.")]


def _gib(record: Record, part: str) -> float | None:
    value = record.median(f"{part}_bytes")
    return None if value is None else value / GIB


def _memory(records: Sequence[Record]) -> Table:
    """Returns memory by moment and part, and how far the optimizer state of the fullest rank exceeds an
    even share.
    """
    rows = []
    for record in records:
        plain = row_of(records, PLAIN, record.spec["size"])
        total, state = (r.median("optimizer_bytes") if r else None for r in (plain, record))
        ranks = record.spec["ranks"] if record.spec["wrapper"] != PLAIN else 1
        excess = 100 * (state * ranks / total - 1) if total and state else None
        rows.append({
            "size": record.spec["size"],
            "wrapper": record.spec["wrapper"],
            "step ms": plotted(record, "step_ms"),
            **{text: _gib(record, name) for name, text in COLUMNS.items()},
            "state above even share %": excess,
        })  # fmt: skip
    formats = {"state above even share %": "+.2f"}
    return Table.from_rows(rows, caption="Memory of the fullest rank.", formats=formats)


EXPERIMENT = Experiment(
    name="sharded-state",
    title="Sharded optimizer state",
    question="How much memory does each stage of ZeRO save on a rank, and how much time does it cost?",
    method=(
        "The rows are those of the data-parallel experiment with the default buckets. Memory is that "
        "of tensors: initially, before and after the update, and at the peak. It is split into "
        "parameters, gradients before the update, optimizer state and the rest. An even share is the "
        "optimizer state of the plain wrapper divided by the number of ranks."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="the two ranks are processes on one CPU: bytes are as on GPUs, times are not",
)
