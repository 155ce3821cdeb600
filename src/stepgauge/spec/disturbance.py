"""Detects disturbed rows: other work took cores they needed, or their times vary too much."""

import dataclasses

from stepgauge.spec.record import Record

DISTURBED = 1.5  # largest p90 / p10 of an undisturbed row
MISSED_CORES = "missed_cores"  # metric: how many of the cores that a row needed other work took
LEAST_MISSED = 0.15  # the services of a quiet machine take fewer cores than this
CRITERION = f"their p90 is over {DISTURBED} × their p10, or other work took cores of the CPU that they needed"
TRIES = "measurements"  # environment key: how often a disturbed row was measured


def is_disturbed(record: Record) -> bool:
    """Returns True if other work took cores that the row needed, or if p90 / p10 of the step or operation
    time is too large, or, in a comparison of peers, that of any peer.

    The cores are known of calibrate, and of bench step, data-parallel and layout on a CPU. Of other rows,
    one that other work slowed evenly is not noticed.
    """
    if lacked_cores(record):
        return True
    timed = [record.metrics[name] for name in ("step_ms", "time_ms") if name in record.metrics]
    timed = timed or [sample for sample in record.metrics.values() if sample.unit == "ms"]
    return any(sample.p90 > DISTURBED * sample.p10 for sample in timed)


def lacked_cores(record: Record) -> bool:
    """Returns True if other work is known to have taken cores that the row needed."""
    return (record.median(MISSED_CORES) or 0.0) > LEAST_MISSED


def describe_disturbance(record: Record) -> str:
    """Returns a note on what disturbed the row, and on how often it was measured again."""
    tries = record.environment.get(TRIES, 1)
    repeated = f", also in the last of {tries} measurements" if tries > 1 else ""
    if lacked_cores(record):
        missed = record.median(MISSED_CORES)
        return f"disturbed: other work took {missed:.1f} CPU cores that it needed{repeated}"
    return f"disturbed: p90 is over {DISTURBED} × p10{repeated}"


def with_tries(record: Record, tries: int) -> Record:
    """Returns the record with the number of measurements in its environment, if above 1."""
    if tries == 1:
        return record
    return dataclasses.replace(record, environment={**record.environment, TRIES: tries})
