"""Names of the host's times, which launches work for GPUs, and which of them count for a number of ranks.

Ranks share the host: while four run, launching a block takes longer than while one does. So these times
are measured on several numbers of ranks.
"""

import math
import re
from collections.abc import Mapping

from stepgauge.spec.calibration import OperationTable

RANKS = re.compile(r"(?<= [dct]p)\d+")  # the number of ranks of an axis, in a table's name
Tables = Mapping[str, OperationTable]


def is_host_operation(operation: str) -> bool:
    """Returns True for the name of a table of the host's times."""
    return operation.startswith("host ")


def without_ranks(operation: str) -> str:
    """Returns a name without the numbers of ranks of its layout: ranks launch the same work, however many
    there are.
    """
    return RANKS.sub("", operation)


def host_tables(by_ranks: Mapping[int, Tables], ranks: int) -> Tables:
    """Returns the host's times measured on the nearest number of ranks; none for one rank.

    What was not measured there is taken from the next nearest.
    """
    found: dict[str, OperationTable] = {}
    numbers = [number for number in by_ranks if ranks > 1]
    for number in sorted(numbers, key=lambda number: -abs(math.log(number / ranks))):
        tables = {n: t for n, t in by_ranks[number].items() if is_host_operation(n)}
        replaced = {without_ranks(name) for name in tables}
        found = {n: t for n, t in found.items() if without_ranks(n) not in replaced} | tables
    return found
