"""`stepgauge topo`: the links between GPUs, NUMA nodes and network interfaces."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stepgauge.cli.console import print_table, write_file
from stepgauge.report.topology import gpu_table, interface_table, node_table, topology_page
from stepgauge.spec.topology import Topology


def topo(
    *,
    format: Annotated[Literal["table", "json"], Parameter(help="Output format.")] = "table",
    report: Annotated[
        Path | None, Parameter(help="Also write an HTML file with a picture of the links.")
    ] = None,
) -> None:
    """Show how this machine's GPUs, NUMA nodes and network interfaces are linked."""
    from stepgauge.measure.topology import topology

    machine = topology()
    if format == "json":
        links = {f"{i}-{j}": name for (i, j), name in machine.links.items()}
        print(json.dumps({**dataclasses.asdict(machine), "links": links}, indent=1))
    else:
        _print_tables(machine)
    if report is not None:
        write_file(topology_page(machine), report, "picture")


def _print_tables(machine: Topology) -> None:
    print(f"{machine.host}: {machine.cpu}, {machine.cores} cores\n")
    if machine.gpus:
        print_table(gpu_table(machine))
    else:
        print(f"No GPUs: {machine.without_gpus}.")
    for table in (node_table(machine), interface_table(machine)):
        print()
        print_table(table)
