"""The nesting of a trace as a flame graph: phases, parts of the model, operations, kernels.

Written as collapsed stacks (one line a path, as Brendan Gregg's flamegraph.pl reads) and as
speedscope's JSON.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from stepgauge.trace.attribution import Paths

Tree = list[Any]  # [name, µs of its own, children]


def tree(paths: Paths, times: Mapping[int, float]) -> Tree:
    """Paths that took time: nested [name, own µs, children], in the order of their first run."""
    nodes: dict[int, Tree] = {0: ["", 0.0, []]}
    for node, us in times.items():
        _place(paths, nodes, node)[1] += us
    return nodes[0]


def _place(paths: Paths, nodes: dict[int, Tree], node: int) -> Tree:
    missing = []
    while node not in nodes:
        missing.append(node)
        node = paths.nodes[node][0]
    found = nodes[node]
    for child in reversed(missing):
        nodes[child] = [paths.nodes[child][1], 0.0, []]
        found[2].append(nodes[child])
        found = nodes[child]
    return found


def collapsed(flame: Tree) -> Iterable[str]:
    """`forward;blocks.0;attention;softmax 12345`: in ns, as the format has whole numbers."""
    for names, us in _paths(flame):
        yield f"{';'.join(name.replace(';', ',') for name in names)} {round(us * 1e3)}"


def speedscope(flame: Tree, title: str) -> str:
    """JSON of https://www.speedscope.app's file format, one sampled profile, one sample a path."""
    frames: dict[str, int] = {}
    samples, weights = [], []
    for names, us in _paths(flame):
        samples.append([frames.setdefault(name, len(frames)) for name in names])
        weights.append(round(us, 3))
    profile = {
        "type": "sampled",
        "name": title,
        "unit": "microseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": title,
            "exporter": "stepgauge",
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": [profile],
        }
    )


def _paths(flame: Tree) -> Iterable[tuple[list[str], float]]:
    """(names from the outside in, µs) of every node with time of its own, in order."""
    pending: list[tuple[Tree, list[str]]] = [(child, []) for child in reversed(flame[2])]
    while pending:
        (name, us, children), outer = pending.pop()
        names = [*outer, name]
        if us > 0:
            yield names, us
        pending += [(child, names) for child in reversed(children)]
