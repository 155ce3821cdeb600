"""Shared by commands that measure steps: each row's prediction, made before the row is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import Format, info, print_records, progress
from stepgauge.cli.rows import hardware_argument, store_for
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import calibrated_files, file_of, known_files
from stepgauge.spec.predictions import is_for
from stepgauge.spec.record import Record

Hardware = Annotated[
    Path | None,
    Parameter(
        help="Hardware file, or its name, from which rows are predicted. [default: the file of this device]",
        converter=hardware_argument,
    ),
]
NoPredict = Annotated[bool, Parameter(help="Do not predict the rows.")]


def predict_rows(
    specs: Sequence[Any],
    out: Path,
    hardware: Path | None,
    *,
    fresh: bool,
    is_requested: bool = True,
    expected: Sequence[str] = (),
) -> list[Record]:
    """Predicts the rows from a hardware file and returns the records, which are on disk before any
    row is run. Returns none without a hardware file. Prints which rows cannot be predicted.

    is_requested  False: print nothing if no row can be predicted
    expected      each row's note on what its prediction may miss
    """
    from stepgauge.validate.predict_first import predict_before

    if hardware is None:
        return []
    file, store = HardwareFile.read(hardware), store_for(out)
    store.prepare()
    with store.held(), progress(len(specs), "rows") as (bar, task):
        bar.update(task, description="predicting")
        found, refused, outdated = predict_before(
            bar.track(specs, task_id=task), file, store, fresh=fresh, expected=expected
        )
    if found or is_requested:
        info(f"{len(found)} of {len(specs)} rows predicted from {hardware}")
        for reason, count in refused.items():
            info(f"not predicted ({count} of {len(specs)}): {reason}")
        if outdated:
            info(
                f"{outdated} of them were measured in {out} before and keep the predictions made then; "
                f"{hardware} gives others now: --fresh predicts and measures them again"
            )
    return found


def hardware_of(device: str, earlier: Sequence[Record] = ()) -> Path | None:
    """Returns the hardware file of this device, or None. `earlier` are rows measured on it, which
    name the device without torch.
    """
    if not known_files():
        return None
    if earlier:
        measured = earlier[0].environment
        return file_of(measured["device"], measured["threads"])

    return file_of(*_name_and_threads(device))


def why_no_hardware(device: str) -> str:
    """Returns a sentence that says why a device has no hardware file, and how to make it."""
    name, threads = _name_and_threads(device)
    others = [file for file in calibrated_files().values() if file.device == name]
    if not others:
        return "there is no hardware file of this device: stepgauge calibrate --ranks 2 makes it"
    return (
        f"the hardware file {others[0].name} is for {others[0].threads} threads, but this process has "
        f"{threads} (OMP_NUM_THREADS): stepgauge calibrate FILE --ranks 2 makes one for {threads}"
    )


def _name_and_threads(device: str) -> tuple[str, int]:
    """Returns the device's name and the number of threads that operations on a CPU use."""
    import torch

    from stepgauge.measure.environment import device_name
    from stepgauge.runtime.workers import run_isolated

    # In a separate process, because asking for a GPU's name allocates memory on it.
    return run_isolated(device_name, torch.device(device)), torch.get_num_threads()


def print_with_predictions(
    predictions: Sequence[Record], measured: Sequence[Record], format: Format
) -> None:
    """Prints the rows with their predictions, and a summary of the errors."""
    from stepgauge.report.prediction_errors import sentence

    print_records([*predictions, *measured], format)
    if predictions:
        note_other_device(predictions, measured)
        info(sentence([*predictions, *measured]))


def note_other_device(predictions: Sequence[Record], measured: Sequence[Record]) -> None:
    """Prints a note if the predictions are for another device than the one that ran the rows: they
    are then separate rows.
    """
    if measured and not any(is_for(p, row) for p in predictions for row in measured):
        info(
            f"the predictions are for {predictions[0].environment['device']}, but the rows ran on "
            f"{measured[0].environment['device']}, so they are not compared"
        )
