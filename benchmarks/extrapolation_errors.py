"""Extrapolates each table of a hardware file from a part of its shapes to the rest, and prints the errors.

    python benchmarks/extrapolation_errors.py [hardware/h200-sxm.json]

A part is the smallest, or the largest, 10, 30 and 60 % of a table's shapes. Prints a JSON line for each
distance from the nearest kept shape: the number of times, and quantiles of predicted over measured.
"""

import collections
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from stepgauge.cost.rates.estimate import EXTRAPOLATED
from stepgauge.cost.rates.grid import WORK, Grid, grouped_flops
from stepgauge.spec.calibration import ALONE, EXACT, OperationTable
from stepgauge.spec.hardware import HardwareFile

SHARES = (0.1, 0.3, 0.6)
LEAST_ROWS = 6
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
DEFAULT = Path(__file__).parents[1] / "hardware" / "h200-sxm.json"


def ratios(name: str, table: OperationTable) -> Iterator[tuple[float, float]]:
    """Yields the distance (times as large; below 1: as small) and predicted over measured time."""
    work = grouped_flops if "grouped" in name else WORK[name.split()[0]]
    ascending = sorted(table.rows, key=lambda row: work(*row[:-1]))
    for rows in (ascending, ascending[::-1]):
        for share in SHARES:
            kept = max(2, int(share * len(rows)))
            part = dataclasses.replace(table, rows=tuple(rows[:kept]))
            grid = Grid(part, work, may_be_launches=False)
            for *sizes, us in rows[kept:]:
                estimate = grid.time(sizes)
                if estimate.source == EXTRAPOLATED:
                    away = estimate.times_away
                    yield (1 / away if estimate.smaller else away), estimate.us / us


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    by_distance: dict[int, list[float]] = collections.defaultdict(list)
    for name, table in HardwareFile.read(path).operations.items():
        is_repeated = name.endswith((f" {ALONE}", f" {EXACT}"))
        if not is_repeated and name.split()[0] in WORK and len(table.rows) >= LEAST_ROWS:
            for times, ratio in ratios(name, table):
                by_distance[2 * math.floor(math.log2(times) / 2)].append(ratio)
    for exponent, found in sorted(by_distance.items()):
        found.sort()
        quantiles = {f"p{100 * q:.0f}": found[int(q * len(found))] for q in QUANTILES}
        line = {"from": 2.0**exponent, "to": 2.0 ** (exponent + 2), "times": len(found)}
        print(json.dumps({**line, **{name: round(value, 4) for name, value in quantiles.items()}}))


if __name__ == "__main__":
    main()
