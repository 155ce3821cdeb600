"""A host tensor brought to every GPU: the schedules beside each other."""

from collections.abc import Sequence

from stepgauge.report.figure import grouped_bars, short_bytes
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Table
from stepgauge.report.views import remarked
from stepgauge.spec.broadcast import BLOCKLESS
from stepgauge.spec.record import Record

_COLUMNS = {
    "GB/s to each": "gb_per_s",
    "of one host link": "of_host_link",
    "bound ms": "bound_ms",
    "of the bound": "of_bound",
    "host link GB/s": "host_link_gb_per_s",
    "all host links GB/s": "host_links_gb_per_s",
    "peer link GB/s": "peer_link_gb_per_s",
    "host copy GB/s": "host_copy_gb_per_s",
    "wrong": "wrong",
}


def broadcast_table(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """Each row's time, its rate, and what the links gave alone in the same run."""
    rows = []
    for record in records:
        spec, time = record.spec, record.metrics.get("time_ms")
        rows.append({
            "schedule": spec["schedule"], "block": _block(record), "devices": spec["gpus"],
            "size B": spec["size_bytes"],
            "mean ms": time.mean if time else None,
            "std ms": time.std if time else None,
            "median ms": time.median if time else None,
            **{text: record.median(metric) for text, metric in _COLUMNS.items()},
            **remarked(record, records),
        })  # fmt: skip
    caption = (
        "GB/s to each: the tensor's bytes over the time until every device has all of it. The links "
        "were measured alone, in the same run."
    )
    return Table.from_rows(rows, caption=caption, names=4)


def _block(record: Record) -> str:
    block = record.spec["block_bytes"]
    return (
        ""
        if record.spec["schedule"] in BLOCKLESS
        else short_bytes(block) + ("iB" if block >= 1024 else " B")
    )


def broadcast_blocks(records: Sequence[Record]) -> list[Block]:
    shown: list[Block] = []
    good = [record for record in records if record.status == "ok"]
    if good:
        labels = [f"{r.spec['schedule']} {_block(r)}".strip() for r in good]
        if len({r.spec["gpus"] for r in good}) > 1:
            labels = [f"{label} to {r.spec['gpus']}" for label, r in zip(labels, good, strict=True)]
        bars = {"GB/s to each": [r.median("gb_per_s") for r in good]}
        link = number(good[0].median("host_link_gb_per_s"))
        svg = grouped_bars(labels, bars, unit="GB/s")
        shown.append(
            Plot(
                svg,
                f"What each schedule gives to each device; one host link alone gives {link} GB/s.",
            )
        )
    return [*shown, broadcast_table(records)]
