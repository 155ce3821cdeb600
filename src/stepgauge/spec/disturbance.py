"""When a measured row is disturbed: other work took cores that it needed, or its times spread far."""

import dataclasses

from stepgauge.spec.record import Record

DISTURBED = 1.5
MISSED_CORES = "missed_cores"  # a metric: what others had of the cores that a row needed
LEAST_MISSED = 0.15  # a quiet machine's own services stay below
CRITERION = (
    "other work took cores that they needed, or, where that is not known, their p90 is over "
    f"{DISTURBED} × their p10"
)
TRIES = "measurements"  # of an environment: how often a disturbed row was measured


def is_disturbed(record: Record) -> bool:
    """Whether other work took cores that a row needed, or its times spread so far that its median is
    doubtful: of the step or the operation, else of any of the peers that are timed.
    """
    if MISSED_CORES in record.metrics:
        return (record.median(MISSED_CORES) or 0.0) > LEAST_MISSED
    timed = [record.metrics[name] for name in ("step_ms", "time_ms") if name in record.metrics]
    timed = timed or [sample for sample in record.metrics.values() if sample.unit == "ms"]
    return any(sample.p90 > DISTURBED * sample.p10 for sample in timed)


def describe_disturbance(record: Record) -> str:
    """What a row that is_disturbed was disturbed by, and that measuring it again did not help."""
    tries = record.environment.get(TRIES, 1)
    every = f", in the last of {tries} measurements too" if tries > 1 else ""
    if missed := record.median(MISSED_CORES):
        return f"disturbed: other work had {missed:.1f} of the cores that it needed{every}"
    return f"disturbed: p90 is over {DISTURBED} × p10{every}"


def with_tries(record: Record, tries: int) -> Record:
    """The record, its environment saying how often it was measured where that was not once."""
    if tries == 1:
        return record
    return dataclasses.replace(record, environment={**record.environment, TRIES: tries})
