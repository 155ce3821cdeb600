"""What commands that measure steps share: the prediction made before each row, shown beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_records, tell
from stepgauge.cli.rows import existing_hardware, store_for
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import calibrated_files, file_of, known_files
from stepgauge.spec.predictions import is_for
from stepgauge.spec.record import Record

Hardware = Annotated[
    Path | None,
    Parameter(
        help="Hardware file, or its name, that each row is predicted from before it is run. [that of "
        "this device]",
        converter=existing_hardware,
    ),
]
NoPredict = Annotated[bool, Parameter(help="Predict nothing.")]


def predict_rows(
    specs: Sequence[Any],
    out: Path,
    hardware: Path | None,
    *,
    fresh: bool,
    is_asked: bool = True,
    expected: Sequence[str] = (),
) -> list[Record]:
    """The predictions of the rows from a hardware file, on disk before any is run; none without one.
    Says which rows cannot be predicted, where that was asked for or others can. `expected` are the
    rows' notes on what their predictions may miss.
    """
    from stepgauge.validate.predict_first import predict_before

    if hardware is None:
        return []
    file, store = HardwareFile.read(hardware), store_for(out)
    store.prepare()
    with store.held():
        found, refused, outdated = predict_before(
            specs, file, store, fresh=fresh, expected=expected
        )
    if found or is_asked:
        tell(f"{len(found)} of {len(specs)} rows predicted from {hardware}")
        for reason, count in refused.items():
            tell(f"not predicted ({count} of {len(specs)}): {reason}")
        if outdated:
            tell(
                f"{outdated} of them were measured in {out} before and keep their predictions of "
                f"then, which are not what {hardware} gives now: --fresh makes both again"
            )
    return found


def hardware_of(device: str, earlier: Sequence[Record] = ()) -> Path | None:
    """The hardware file of this device, where there is one; `earlier` are rows that it measured."""
    if not known_files():
        return None
    if earlier:
        measured = earlier[0].environment
        return file_of(measured["device"], measured["threads"])

    return file_of(*_this_device(device))


def why_no_hardware(device: str) -> str:
    """A sentence for a device that no hardware file is of."""
    name, threads = _this_device(device)
    others = [file for file in calibrated_files().values() if file.device == name]
    if not others:
        return "there is no hardware file of this device: stepgauge calibrate --ranks 2 makes it"
    return (
        f"the hardware file {others[0].name} is of {others[0].threads} threads, and this process has "
        f"{threads} (OMP_NUM_THREADS): stepgauge calibrate FILE --ranks 2 makes one of as many"
    )


def _this_device(device: str) -> tuple[str, int]:
    """Its name, and how many threads a CPU's operations run on."""
    import torch

    from stepgauge.measure.environment import device_name
    from stepgauge.runtime.workers import run_isolated

    where = torch.device(device)  # named in a process of its own: that takes memory of a GPU
    return run_isolated(device_name, where), torch.get_num_threads()


def print_beside(predictions: Sequence[Record], measured: Sequence[Record], format: Format) -> None:
    """The rows with their predictions, and what the errors come to."""
    from stepgauge.report.prediction_errors import sentence

    print_records([*predictions, *measured], format)
    if predictions:
        tell_of_other_devices(predictions, measured)
        tell(sentence([*predictions, *measured]))


def tell_of_other_devices(predictions: Sequence[Record], measured: Sequence[Record]) -> None:
    """Says whose predictions stand in rows of their own, where none is of the device that ran."""
    if measured and not any(is_for(p, row) for p in predictions for row in measured):
        tell(
            f"the predictions are of {predictions[0].environment['device']}; the rows ran on "
            f"{measured[0].environment['device']} and stand apart"
        )
