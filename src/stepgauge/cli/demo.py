"""`stepgauge demo ...`: small demonstrations of types and operations."""

from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli.console import Format, info, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import resolve_devices_and_models
from stepgauge.report.dtypes import EXPLANATION, accumulation_table
from stepgauge.spec.dtypes import AccumulationSpec

app = App(name="demo", help="Show effects of floating-point types in small examples.")


@app.command
@spec_options(AccumulationSpec)
def accumulation(
    *,
    values: Values,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Add 0.01 a thousand times, in four combinations of floating-point types."""
    from stepgauge.bench.dtypes import run_accumulation

    (spec,) = resolve_devices_and_models(expand(AccumulationSpec, values))
    print_table(accumulation_table(run_accumulation(spec)), format)
    if format == "table":
        info(EXPLANATION)
