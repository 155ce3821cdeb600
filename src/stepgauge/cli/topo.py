"""`stepgauge topo`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stepgauge.cli.console import print_table, write
from stepgauge.report.topology import gpu_table, interface_table, node_table, topology_page
from stepgauge.spec.topology import Topology


def topo(
    *,
    format: Annotated[Literal["table", "json"], Parameter(help="What to print.")] = "table",
    report: Annotated[Path | None, Parameter(help="An HTML file with the picture, too.")] = None,
) -> None:
    """Show what links which GPU, NUMA node and network interface of this machine."""
    from stepgauge.measure.topology import topology

    found = topology()
    if format == "json":
        links = {f"{i}-{j}": name for (i, j), name in found.links.items()}
        print(json.dumps({**dataclasses.asdict(found), "links": links}, indent=1))
    else:
        _print(found)
    if report is not None:
        write(topology_page(found), report, "picture")


def _print(found: Topology) -> None:
    print(f"{found.host}: {found.cpu}, {found.cores} cores\n")
    if found.gpus:
        print_table(gpu_table(found))
    else:
        print(f"No GPUs: {found.without_gpus}.")
    for table in (node_table(found), interface_table(found)):
        print()
        print_table(table)
