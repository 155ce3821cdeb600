"""Tables of the host's times: their names, and which of them count for a number of ranks.

The host launches the work of all GPUs of a machine. While four ranks do so, launching a block takes longer
than while one does, so these times are measured on several numbers of ranks.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping

from stepgauge.spec.calibration import OperationTable

RANKS_OF_AXIS = re.compile(r"(?<= [dct]p)\d+")  # in a table's name
Tables = Mapping[str, OperationTable]


def is_host_operation(operation: str) -> bool:
    """Returns True for the name of a table of the host's times."""
    return operation.startswith("host ")


def nearest_operation(operation: str, known: Iterable[str]) -> str:
    """Returns the known name that differs the least in its layout's numbers of ranks: ranks launch the same
    work, however many there are. Returns the operation itself if no name differs in nothing else.
    """

    def distance(other: str) -> float:
        pairs = zip(RANKS_OF_AXIS.findall(other), RANKS_OF_AXIS.findall(operation), strict=True)
        return sum(abs(math.log(int(a) / int(b))) for a, b in pairs)

    same = (other for other in known if _without_ranks(other) == _without_ranks(operation))
    return min(same, key=distance, default=operation)


def host_tables(by_ranks: Mapping[int, Tables], ranks: int) -> Tables:
    """Returns the host's times measured on the nearest number of ranks; none for one rank.

    What was not measured there is taken from the next nearest.
    """
    if ranks == 1:
        return {}
    found: dict[str, OperationTable] = {}
    for number in sorted(by_ranks, key=lambda number: abs(math.log(number / ranks))):
        nearer = set(map(_without_ranks, found))
        for name, table in by_ranks[number].items():
            if is_host_operation(name) and _without_ranks(name) not in nearer:
                found[name] = table
    return found


@functools.cache
def _without_ranks(operation: str) -> str:
    return RANKS_OF_AXIS.sub("", operation)
