"""Records of kinds "dtypes" and "accumulation" as tables."""

import re

from stepgauge.report.names import describe
from stepgauge.report.table import Table
from stepgauge.spec.record import Record

EXPLANATION = (
    "0.01 has no exact binary representation: fp32 stores 0.0099999998, fp16 stores 0.0100021. A "
    "thousand of the fp16 terms add up to 10.0021 in an fp32 sum; casting each term to fp32 first "
    "changes nothing, because the addition casts it anyway. An fp16 sum is rounded after every "
    "addition: from 8 on its values are 0.0078 apart, so adding 0.01 adds only 0.0078. This is why "
    "sums (in matrix products, gradients, means) are kept in fp32 even if their terms are not."
)


def dtype_table(record: Record, *, each: bool = False) -> Table:
    """Returns the types of all tensors in a step. Unless `each`, a module that all blocks have is one
    row.
    """
    head, *tensors = record.tables["dtypes"]
    counts: dict[tuple[str, ...], int] = {}
    for role, path, module, dtype in tensors:
        row = (role, path if each else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), dtype, module)
        counts[row] = counts.get(row, 0) + 1
    rows = [[*row, count] for row, count in counts.items()]
    caption = f"Tensor types in one step: {describe(record).removeprefix('dtypes ')}"
    what, where, module_name, type_name = head
    columns = [what, where, type_name, module_name, "tensors"]
    return Table(columns, rows, caption=caption, folded=True)


def accumulation_table(record: Record) -> Table:
    """Returns the sum of a thousand times 0.01 for each pair of types, and its error."""
    head, *sums = record.tables["sums"]
    rows = [[name, total, total - 10] for name, total in sums]
    return Table(
        [*head, "error"],
        rows,
        formats={"sum": ".4f", "error": "+.4f"},
        caption="Rounding error of a sum, by the type of its terms and of the sum",
    )
