"""`stepgauge demo ...`: small demonstrations of what a type or an operation does."""

from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli.console import Format, print_table, tell
from stepgauge.report.table import Table

app = App(name="demo", help="Small demonstrations.")

EXPLANATION = (
    "0.01 is no binary fraction. fp32 holds 0.0099999998, fp16 0.0100021: rounded once, its thousand add up to 10.0021 "
    "in fp32, and casting each term first changes nothing, since addition casts it anyway. An fp16 sum is rounded at "
    "every addition, from 8 on to steps of 0.0078, where 0.01 becomes 0.0078: it falls behind. Hence sums (of "
    "products, gradients, means) are kept in fp32 whatever their terms are."
)


@app.command
def accumulation(*, format: Annotated[Format, Parameter(help="How the table is printed.")] = "table") -> None:
    """Add 0.01 a thousand times, in four combinations of types."""
    from stepgauge.measure.dtypes import accumulation

    rows = [[name, f"{value:.4f}", f"{value - 10:+.4f}"] for name, value in accumulation().items()]
    table = Table(["1000 × 0.01", "sum", "error"], rows, numeric=frozenset(("sum", "error")))
    if format != "table":
        print(table.to(format), end="")
        return
    print_table(table)
    tell(EXPLANATION)
