"""`stepgauge demo ...`: small demonstrations of what a type or an operation does."""

from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli.console import Format, print_in, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import resolve_devices
from stepgauge.report.dtypes import EXPLANATION, accumulation_table
from stepgauge.spec.dtypes import AccumulationSpec

app = App(name="demo", help="Small demonstrations.")


@app.command
@spec_options(AccumulationSpec)
def accumulation(
    *,
    values: Values,
    format: Annotated[Format, Parameter(help="How the table is printed.")] = "table",
) -> None:
    """Add 0.01 a thousand times, in four combinations of types."""
    from stepgauge.bench.dtypes import run_accumulation

    (spec,) = resolve_devices(expand(AccumulationSpec, values))
    print_in(format, accumulation_table(run_accumulation(spec)))
    if format == "table":
        tell(EXPLANATION)
