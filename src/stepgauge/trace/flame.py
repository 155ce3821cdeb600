"""The nesting of a trace as a flame graph: phases, parts of the model, operations, kernels."""

from collections import defaultdict
from collections.abc import Mapping
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
