"""Rows measured in turns: A B C A B C ... instead of A A B B C C.

If the machine's speed drifts, the drift affects all rows alike, so that their times can be compared.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from stepgauge.spec.record import Record

DEFAULT_TURNS = (
    3  # with three turns, one row beats another in every turn by chance in 1 of 20 cases
)
BEGAN = "turns_began"  # environment key: rows with the same value were measured in the same turns
STEP_MS = "turn_step_ms"  # series: the median step time of each turn


def of_turns(measured: Sequence[Record], began: str) -> Record:
    """Merges the records of a row's turns into one: the turn with the median step time.

    If a turn failed, its record is returned.
    """
    failed = [record for record in measured if record.status != "ok"]
    if failed:
        return failed[0]
    steps = [record.median("step_ms") or 0.0 for record in measured]
    record = measured[steps.index(statistics.median_low(steps))]
    return dataclasses.replace(
        record,
        series={**record.series, STEP_MS: steps},
        environment={**record.environment, BEGAN: began},
    )


def turns_together(records: Sequence[Record]) -> int:
    """Returns the number of turns that the rows had together; 0 if measured separately."""
    began = {record.environment.get(BEGAN) for record in records}
    counts = {len(record.series.get(STEP_MS, ())) for record in records}
    return min(counts) if len(began) == 1 and None not in began else 0
