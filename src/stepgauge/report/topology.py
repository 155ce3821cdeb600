"""Tables and a picture of a machine's topology."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.figure import FAINT, GRID, INK, SERIES, canvas
from stepgauge.report.numbers import whole
from stepgauge.report.page import Block, Page, Plot, Section, Text
from stepgauge.report.table import Table
from stepgauge.spec.topology import Topology
from stepgauge.spec.units import GIB

Point = tuple[float, float]
LABEL_POINTS = 9  # distance of a label from its line


@dataclasses.dataclass(frozen=True)
class Edge:
    """A line between two boxes. `weight` scales its width."""

    source: str
    target: str
    label: str = ""
    weight: float = 1.0
    series: int = 0


def rows(levels: Sequence[Sequence[str]]) -> dict[str, Point]:
    """Returns positions of boxes in centred rows, the first row at the top."""
    widest = max(len(level) for level in levels)
    step = [2.0 * widest / max(1, len(level)) for level in levels]
    return {
        name: ((i + 0.5) * step[row] - widest, -1.5 * row)
        for row, level in enumerate(levels)
        for i, name in enumerate(level)
    }


def network(places: Mapping[str, Point], edges: Sequence[Edge], *, height: float = 3.4) -> str:
    """Returns an SVG of boxes at their positions and of labelled edges between them."""
    with canvas(7.2, height) as (axes, output):
        axes.set_axis_off()
        for edge in edges:
            (x0, y0), (x1, y1) = ends = places[edge.source], places[edge.target]
            colour = SERIES[edge.series % len(SERIES)]
            axes.plot(*zip(*ends, strict=True), color=colour, linewidth=1.3 * edge.weight, zorder=1)
            length = math.hypot(x1 - x0, y1 - y0)
            offset = -LABEL_POINTS * (y1 - y0) / length, LABEL_POINTS * (x1 - x0) / length
            middle = (x0 + x1) / 2, (y0 + y1) / 2
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": FAINT, "fontsize": 8}
            axes.annotate(edge.label, middle, offset, textcoords="offset points", **style)
        box: dict[str, Any] = {"boxstyle": "round,pad=0.5", "facecolor": GRID, "edgecolor": GRID}
        for name, at in places.items():
            axes.text(*at, name, ha="center", va="center", color=INK, fontsize=9, bbox=box)
        xs, ys = zip(*places.values(), strict=True)
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
        axes.set_ylim(min(ys) - 0.35, max(ys) + 0.35)
    return output[0]


LEGEND = (
    "Links: NVn: n NVLinks; PIX, PXB: only PCIe switches; PHB: through the host bridge; NODE: within "
    "a NUMA node; SYS: between NUMA nodes."
)


def gpu_table(topology: Topology) -> Table:
    rows = []
    for gpu in topology.gpus:
        links = {
            f"GPU {other.index}": _link(topology, gpu.index, other.index) for other in topology.gpus
        }
        rate = gpu.nvlink_bytes_per_s
        rows.append({
            "": f"GPU {gpu.index}",
            "name": gpu.name,
            "GiB": gpu.memory_bytes / GIB,
            **links,
            "NVLinks": gpu.nvlinks,
            "NVLink GB/s per direction": rate / 1e9 if rate else None,
            "PCI": gpu.pci_address,
            "PCIe": gpu.pcie,
            "NUMA": gpu.numa_node,
            "near cores": gpu.affinity,
        })  # fmt: skip
    return Table.from_rows(rows, caption=LEGEND, names=2)


def _link(topology: Topology, i: int, j: int) -> str:
    return "·" if i == j else topology.links.get((min(i, j), max(i, j)), "")


def node_table(topology: Topology) -> Table:
    rows = [
        {"NUMA node": node.index, "cores": node.cores, "GiB": node.memory_bytes / GIB}
        for node in topology.numa_nodes
    ]
    return Table.from_rows(rows, caption="Memory.")


def interface_table(topology: Topology) -> Table:
    rows = [
        {
            "interface": interface.name,
            "state": "up" if interface.is_up else "down",
            "Gbit/s": whole(interface.bytes_per_s * 8 / 1e9)
            if interface.bytes_per_s
            else "not stated",
            "NUMA": interface.numa_node,
        }
        for interface in topology.interfaces
    ]
    return Table.from_rows(rows, caption="Network.", numeric=frozenset(("Gbit/s", "NUMA")))


def picture(topology: Topology) -> str:
    """Returns an SVG of the NUMA nodes with their network interfaces and GPUs, and NVLinks."""
    nodes = [f"NUMA {node.index}\n{node.cores}" for node in topology.numa_nodes] or ["host"]
    interfaces = [interface for interface in topology.interfaces if interface.is_up]
    edges = [Edge(one, other) for one, other in itertools.combinations(nodes, 2)]
    for interface in interfaces:
        edges.append(Edge(_node(nodes, topology, interface.numa_node), interface.name, series=1))
    for gpu in topology.gpus:
        node = _node(nodes, topology, gpu.numa_node)
        edges.append(Edge(node, f"GPU {gpu.index}", "PCIe", series=2))
    for (one, other), link in topology.links.items():
        if link.startswith("NV"):
            label = link if other == one + 1 else ""
            edges.append(Edge(f"GPU {one}", f"GPU {other}", label, weight=2.0, series=3))
    names = [interface.name for interface in interfaces]
    gpus = [f"GPU {gpu.index}" for gpu in topology.gpus]
    levels = [level for level in (names, nodes, gpus) if level]
    return network(rows(levels), edges, height=1.2 * len(levels))


def _node(nodes: list[str], topology: Topology, index: int | None) -> str:
    indices = [node.index for node in topology.numa_nodes]
    return nodes[indices.index(index)] if index in indices else nodes[0]


def topology_blocks(topology: Topology) -> list[Block]:
    shown: list[Block] = [
        Plot(picture(topology), "Which GPU and network interface is attached to which NUMA node.")
    ]
    shown.append(
        gpu_table(topology) if topology.gpus else Text(f"No GPUs: {topology.without_gpus}.")
    )
    return [*shown, node_table(topology), interface_table(topology)]


def topology_page(topology: Topology) -> str:
    """Returns the HTML document."""
    question = "How are GPUs, NUMA nodes and network interfaces connected?"
    return Page(
        title="stepgauge topo",
        sections=[Section("Topology", question, topology_blocks(topology))],
        facts={"Host": topology.host, "CPU": f"{topology.cpu}, {topology.cores} cores"},
    ).html()
