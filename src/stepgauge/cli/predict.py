"""`stepgauge predict`: the rows that a bench command would give on a calibrated machine."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_records, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.validate.predicted import predicted

Hardware = Annotated[
    Path, Parameter(help="Hardware file of a calibrated machine; hardware/ has some.")
]


@spec_options(StepSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "cuda"})
def predict(
    *,
    values: Values,
    hardware: Hardware,
    layout: Annotated[
        str,
        Parameter(help='Over several GPUs: "dp2", "dp4 naive"; as bench data-parallel gives it.'),
    ] = "none",
    terms: Annotated[
        bool, Parameter(help="Print every term of every row, too.", negative="")
    ] = False,
    format: Annotated[Format, Parameter(help="How the rows are printed.")] = "table",
) -> None:
    """Predict training steps on a machine that was calibrated, without it and without torch.

    The rows have the columns of bench step, or with --layout of bench data-parallel, and are
    marked as modelled. Each is a sum of named terms, from calibrated shapes or interpolated between
    them; nothing is scaled to fit.
    """
    specs = _specs(values, Layout.parse(layout))
    file = HardwareFile.read(hardware)
    records = [predicted(spec, file) for spec in specs]
    print_records(records, format)
    if terms:
        from stepgauge.report.predict import terms_table

        for record in records:
            print_table(terms_table(record))


def _specs(values: Values, layout: Layout) -> list[StepSpec] | list[DataParallelSpec]:
    """Raises ValueError for axes that are not predicted yet, and options that the layout's command
    does not have.
    """
    if set(layout.axes) - {"data"}:
        raise ValueError(f"layout is {str(layout)!r}; only a data axis is predicted yet")
    if layout.data == 1:
        return expand(StepSpec, values)
    known = {field.name for spec in (DataParallelSpec, ModelSpec) for field in fields(spec)}
    if foreign := [name for name in values if name not in known]:
        raise ValueError(f"{foreign[0]} is no option of a step over {layout.data} ranks")
    return expand(
        DataParallelSpec, {**values, "ranks": (layout.data,), "wrapper": (layout.wrapper,)}
    )
