"""Records of kinds "dtypes" and "accumulation" as tables."""

import re

from stepgauge.report.names import describe
from stepgauge.report.table import Table
from stepgauge.spec.record import Record

EXPLANATION = (
    "0.01 is no binary fraction. fp32 holds 0.0099999998, fp16 0.0100021: rounded once, its "
    "thousand add up to 10.0021 in fp32, and casting each term first changes nothing, since "
    "addition casts it anyway. An fp16 sum is rounded at every addition, from 8 on to steps of "
    "0.0078, where 0.01 becomes 0.0078: it falls behind. Hence sums (of products, gradients, "
    "means) are kept in fp32 whatever their terms are."
)


def dtype_table(record: Record, *, each: bool = False) -> Table:
    """Every type of a step, the same place in every block as one row unless `each`."""
    head, *found = record.tables["dtypes"]
    counts: dict[tuple[str, ...], int] = {}
    for what, path, module, dtype in found:
        row = (what, path if each else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), module, dtype)
        counts[row] = counts.get(row, 0) + 1
    rows = [[*row, count] for row, count in counts.items()]
    caption = f"Types of one step: {describe(record).removeprefix('dtypes ')}"
    return Table([*head, "tensors"], rows, caption=caption, folded=True)


def accumulation_table(record: Record) -> Table:
    """What each pair of types makes of a thousand times 0.01, and how far from 10 it is."""
    head, *sums = record.tables["sums"]
    rows = [[name, total, total - 10] for name, total in sums]
    return Table(
        [*head, "error"],
        rows,
        formats={"sum": ".4f", "error": "+.4f"},
        caption="What a sum's type loses",
    )
