"""`stepgauge predict`: the rows that `bench step` would give on a calibrated machine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_records, print_table, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore

Hardware = Annotated[
    Path, Parameter(help="Hardware file of a calibrated machine; hardware/ has some.")
]


@spec_options(StepSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "cuda"})
def predict(
    *,
    values: Values,
    hardware: Hardware,
    terms: Annotated[
        bool, Parameter(help="Print every term of every row, too.", negative="")
    ] = False,
    format: Annotated[Format, Parameter(help="How the rows are printed.")] = "table",
) -> None:
    """Predict training steps on a machine that was calibrated, without it and without torch.

    The rows have the columns of bench step and are marked as modelled. Each is a sum of named
    terms, from calibrated shapes or interpolated between them; nothing is scaled to fit.
    """
    records = predicted(list(expand(StepSpec, values)), hardware)
    print_records(records, format)
    if terms:
        from stepgauge.report.predict import terms_table

        for record in records:
            print_table(terms_table(record))


def predicted(specs: Sequence[StepSpec], hardware: Path) -> list[Record]:
    """The modelled record of each step. Raises ValueError for what is not modelled."""
    from stepgauge.cost.machine import Machine
    from stepgauge.cost.step import predict as predict_step

    machine = Machine(HardwareFile.read(hardware))
    return [predict_step(spec, machine) for spec in specs]


def predict_before(
    specs: Sequence[StepSpec], hardware: Path | None, store: RunStore
) -> Sequence[Record]:
    """Writes what is predicted of the rows into the run before they are measured; says which rows
    cannot be predicted.
    """
    if hardware is None:
        return []
    written, refused = [], {}
    for spec in specs:
        try:
            (record,) = predicted([spec], hardware)
        except ValueError as error:
            refused[str(error)] = spec
            continue
        record = dataclasses.replace(record, note="predicted before it was measured")
        with store.held():
            store.append(record)
        written.append(record)
    for reason in refused:
        tell(f"not predicted: {reason}")
    return written


def print_errors(modelled: Sequence[Record], measured: Sequence[Record]) -> None:
    """The table of predicted and measured steps, where there are both."""
    from stepgauge.validate import error_table, pairs

    if found := pairs([*modelled, *measured]):
        print_table(error_table(found))
