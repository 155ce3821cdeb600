"""Which function makes the table of a kind of record."""

import functools
from collections.abc import Callable, Mapping

from stepgauge.report.comm import comm_table
from stepgauge.report.kernels import kernel_table
from stepgauge.report.table import Table
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS

_TABLES: Mapping[str, Callable[..., Table]] = {
    "comm": comm_table,
    "broadcast": functools.partial(record_table, first=["schedule"]),
    "pipeline": functools.partial(record_table, first=["schedule"]),
    **dict.fromkeys(KERNELS, kernel_table),
}


def table_of(kind: str) -> Callable[..., Table]:
    """Returns the function that makes a table of records and of the requested statistics."""
    return _TABLES.get(kind, record_table)
