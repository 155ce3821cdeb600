"""Rows that were measured in turns: a machine whose speed drifts drifts under all of them alike, so
that their times may be compared.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from stepgauge.spec.record import Record

USUAL = 3  # turns: by chance every turn of one row is quicker than all of another in 1 of 20 cases
BEGAN = "turns_began"  # of an environment: rows with one time of it had their turns together
STEP_MS = "turn_step_ms"  # a series: the step's median in each turn


def of_turns(measured: Sequence[Record], began: str) -> Record:
    """One record of a row's turns so far: that of the median step, with the step of every turn; of a
    row that did not run the record that says so.
    """
    not_run = [record for record in measured if record.status != "ok"]
    if not_run:
        return not_run[0]
    steps = [record.median("step_ms") or 0.0 for record in measured]
    record = measured[steps.index(statistics.median_low(steps))]
    return dataclasses.replace(
        record,
        series={**record.series, STEP_MS: steps},
        environment={**record.environment, BEGAN: began},
    )


def turns_together(records: Sequence[Record]) -> int:
    """How many turns the rows had, each with all others; 0 for rows that were measured apart."""
    began = {record.environment.get(BEGAN) for record in records}
    counts = {len(record.series.get(STEP_MS, ())) for record in records}
    return min(counts) if len(began) == 1 and None not in began else 0
