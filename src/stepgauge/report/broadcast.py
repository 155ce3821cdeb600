"""Reports on copying a host tensor to every GPU: a comparison of the schedules."""

from collections.abc import Sequence

from stepgauge.report.figure import grouped_bars
from stepgauge.report.names import labels
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import plotted, record_table
from stepgauge.spec.record import Record

MEANING = (
    "GB/s is the tensor's size divided by the time until every device has all of it. The links "
    "were measured separately, in the same run."
)


def broadcast_blocks(records: Sequence[Record]) -> list[Block]:
    """Bars of the schedules' rates, and the table."""
    shown: list[Block] = [Text(MEANING), record_table(records, first=["schedule"])]
    good = [record for record in records if record.status == "ok"]
    if not good:
        return shown
    rates = {"GB/s to each device": [plotted(record, "gb_per_s") for record in good]}
    link = number(good[0].median("host_link_gb_per_s"))
    caption = (
        f"Rate at which each device receives the tensor. One host link alone reaches {link} GB/s."
    )
    return [Plot(grouped_bars(labels(good), rates, unit="GB/s"), caption), *shown]
