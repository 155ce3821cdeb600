"""The nesting of a trace as a flame graph: phases, parts of the model, operations, kernels.

Written as collapsed stacks (one line a path, as Brendan Gregg's flamegraph.pl reads) and as
speedscope's JSON.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from stepgauge.trace.attribution import Paths
from stepgauge.trace.names import repeated

Tree = list[Any]  # [name, µs of its own, children]
# of the whole: what takes less, together with its like, is left out of the flame graph
SMALLEST = 1e-4
# of a rank's flame graph, a few more a part: eight ranks make a page of under 3 MB
MOST_CHARACTERS = 200_000


def tree(paths: Paths, times: Mapping[int, float]) -> Tree:
    """Paths that took time: nested [name, own µs, children], in the order in which the host came to
    them.
    """
    wanted = set(times)
    for node in times:
        while (node := paths.nodes[node][0]) not in wanted:
            wanted.add(node)
    nodes: dict[int, Tree] = {0: ["", times.get(0, 0.0), []]}
    for node in sorted(wanted - {0}):  # a parent has a smaller number than its children
        parent, name = paths.nodes[node]
        nodes[node] = [name, times.get(node, 0.0), []]
        nodes[parent][2].append(nodes[node])
    return nodes[0]


def thinned(tree: Tree) -> Tree:
    """The tree without parts that no screen shows; their time goes to their parents.

    Equal parts of repeated blocks count together: each alone is small in a model of many blocks.
    """
    together: dict[tuple[str, ...], float] = defaultdict(float)

    def add(node: Tree, path: tuple[str, ...]) -> float:
        us: float = node[1] + sum(add(child, (*path, repeated(child[0]))) for child in node[2])
        together[path] += us
        return us

    def kept(node: Tree, path: tuple[str, ...]) -> Tree:
        us, children = node[1], []
        for child in node[2]:
            place = (*path, repeated(child[0]))
            if together[place] >= least:
                children.append(kept(child, place))
            else:
                us += _size(child)
        return [node[0], round(us, 3), children]

    least = SMALLEST * add(tree, ())
    found = kept(tree, ())
    while _characters(found) > MOST_CHARACTERS:
        least *= 3
        found = kept(tree, ())
    return found


def _characters(tree: Tree) -> int:
    return 20 + len(tree[0]) + sum(map(_characters, tree[2]))


def _size(tree: Tree) -> float:
    size: float = tree[1] + sum(map(_size, tree[2]))
    return size


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
