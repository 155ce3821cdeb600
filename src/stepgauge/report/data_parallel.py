"""Data parallel steps drawn: by wrapper, and traced; the table, and the sweep of bucket sizes."""

from collections.abc import Sequence

from stepgauge.report.bucket_sweep import overhead_blocks
from stepgauge.report.page import Block, Plot
from stepgauge.report.step_plots import overlap_tracks, step_bars
from stepgauge.report.views import record_table
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record

USUAL_BUCKET_MB = DataParallelSpec.bucket_mb
# as many as a plot shows
DRAWN = ("none", "naive", "bucketed", "bucketed bf16", "zero3", "torch-ddp")


def plots(records: Sequence[Record]) -> list[Block]:
    """Steps by wrapper, traced steps, the table and the bucket sweep."""
    good = [record for record in records if record.status == "ok"]
    caption = "Step by wrapper; bf16: gradients are averaged in bf16. The table has all wrappers."
    unit = "ms a step (median, slowest rank)"
    shown: list[Block] = [step_bars(good, caption, row=_size, bar=_bar, bars=DRAWN, unit=unit)]
    traced = [(str(r.spec["wrapper"]), r) for r in good if r.series.get("communication_start_ms")]
    last = [(wrapper, record) for wrapper, record in traced if _size(record) == _size(good[-1])]
    if last:
        caption = f"A traced step of {_size(good[-1])}: communication beside computation, one wrapper above the other."
        shown.append(Plot(overlap_tracks(last), caption))
    return [*shown, record_table(records), *overhead_blocks(good)]


def _size(record: Record) -> str:
    return str(record.spec["size"])


def _bar(record: Record) -> str:
    """The wrapper, with what of its sending is not as usual."""
    usual = {"bucket_mb": USUAL_BUCKET_MB, "reduce_dtype": "own"}
    unusual = [
        str(record.spec[name])
        for name, value in usual.items()
        if record.spec.get(name, value) != value
    ]
    return " ".join([str(record.spec["wrapper"]), *unusual])
