"""A collective explained on the terminal."""

from rich.rule import Rule

from stepgauge.cli.console import Output, print_table
from stepgauge.report.explained import rank_table, step_table, traffic_table
from stepgauge.spec.explain import Explained

MOST_LINES = 8


def print_explained(explained: Explained) -> None:
    console = Output(highlight=False)
    console.print(Rule(explained.op.replace("_", "-"), align="left"))
    print_table(rank_table(explained))
    console.print()
    if explained.steps:
        print_table(step_table(explained))
    elif len(explained.arrows) <= MOST_LINES:
        for arrow in explained.arrows:
            console.print(
                f"  rank {arrow.source} ──[bold]{arrow.what}[/bold]──▶ rank {arrow.target}"
            )
    else:
        print_table(traffic_table(explained))
    if explained.remark:
        console.print(explained.remark)
    console.print()
