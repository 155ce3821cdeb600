"""Which table shows the records of a kind."""

from collections.abc import Callable, Mapping

from stepgauge.report.broadcast import broadcast_table
from stepgauge.report.comm import comm_table
from stepgauge.report.kernels import kernel_table
from stepgauge.report.pipeline import pipeline_table
from stepgauge.report.table import Table
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS

_TABLES: Mapping[str, Callable[..., Table]] = {
    "comm": comm_table,
    "broadcast": broadcast_table,
    "pipeline": pipeline_table,
    **dict.fromkeys(KERNELS, kernel_table),
}


def table_of(kind: str) -> Callable[..., Table]:
    """A function of records, and of the statistics asked for, that gives their table."""
    return _TABLES.get(kind, record_table)
