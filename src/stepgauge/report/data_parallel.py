"""Reports on data-parallel steps: plots by wrapper, a traced step, the table, the bucket sweep."""

from collections.abc import Sequence

from stepgauge.report.bucket_sweep import overhead_blocks
from stepgauge.report.page import Block, Plot
from stepgauge.report.step_plots import overlap_tracks, step_bars
from stepgauge.report.views import record_table
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record

# A plot has room for six bars a cluster.
DRAWN = ("none", "naive", "bucketed", "bucketed bf16", "zero3", "torch-ddp")


def plots(records: Sequence[Record]) -> list[Block]:
    """Returns bars by wrapper, the traced step of each wrapper, the table and the bucket sweep."""
    good = [record for record in records if record.status == "ok"]
    caption = (
        "Step time by wrapper. bf16: gradients are averaged in bf16. The table has all wrappers."
    )
    unit = "ms per step (median, slowest rank)"
    shown: list[Block] = [step_bars(good, caption, row=_size, bar=_bar, bars=DRAWN, unit=unit)]
    traced = [(str(r.spec["wrapper"]), r) for r in good if r.series.get("communication_start_ms")]
    last = [(wrapper, record) for wrapper, record in traced if _size(record) == _size(good[-1])]
    if last:
        caption = (
            f"One traced step of {_size(good[-1])} under each wrapper: when rank 0 communicates and "
            "when it computes."
        )
        shown.append(Plot(overlap_tracks(last), caption))
    return [*shown, record_table(records), *overhead_blocks(good)]


def _size(record: Record) -> str:
    return str(record.spec["size"])


def _bar(record: Record) -> str:
    """Returns the wrapper's name, and its bucket size and reduce type if they are not the default."""
    defaults = {"bucket_mb": DataParallelSpec.bucket_mb, "reduce_dtype": "own"}
    changed = [
        str(record.spec[name])
        for name, value in defaults.items()
        if record.spec.get(name, value) != value
    ]
    return " ".join([str(record.spec["wrapper"]), *changed])
