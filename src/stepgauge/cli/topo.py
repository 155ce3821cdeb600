"""`stepgauge topo`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.tree import Tree

from stepgauge.cli.console import Output, print_table, write
from stepgauge.report.topology import gpu_table, interface_table, link_of, node_table, topology_page
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
        value = dataclasses.asdict(found)
        print(
            json.dumps(
                {**value, "links": {f"{i}-{j}": name for (i, j), name in found.links.items()}},
                indent=1,
            )
        )
    else:
        _print(found)
    if report is not None:
        write(topology_page(found), report, "picture")


def _print(found: Topology) -> None:
    console = Output(highlight=False)
    console.print(_tree(found))
    console.print()
    if found.gpus:
        print_table(gpu_table(found))
    else:
        console.print(f"No GPUs: {found.without_gpus}.")
    console.print()
    print_table(node_table(found))
    console.print()
    print_table(interface_table(found))


def _tree(found: Topology) -> Tree:
    """NUMA nodes, and what hangs on each; what states no node stands under the host."""
    tree = Tree(f"[bold]{found.host}[/bold]  {found.cpu}, {found.cores} cores")
    branches: dict[int | None, Tree] = {}
    for node in found.numa_nodes:
        memory = f"{node.memory_bytes / 2**30:.0f} GiB"
        branches[node.index] = tree.add(f"NUMA node {node.index}  cores {node.cores}, {memory}")
    for gpu in found.gpus:
        others = [
            f"{link_of(found, gpu.index, k.index)} to {k.index}"
            for k in found.gpus
            if k.index != gpu.index
        ]
        text = f"GPU {gpu.index}  {gpu.name}, PCIe {gpu.pcie}" + (
            f"; {', '.join(others)}" if others else ""
        )
        branches.get(gpu.numa_node, tree).add(text)
    for interface in found.interfaces:
        rate = (
            f"{interface.bytes_per_s * 8 / 1e9:g} Gbit/s"
            if interface.bytes_per_s
            else "speed not stated"
        )
        state = "up" if interface.is_up else "down"
        branches.get(interface.numa_node, tree).add(f"{interface.name}  {state}, {rate}")
    return tree
