"""Builds the flame graph of a trace: phases, modules, operations, kernels."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stepgauge.trace.attribution import Paths
from stepgauge.trace.names import repeated

Tree = list[Any]  # [name, own µs, children]
# Fraction of the total time: boxes whose sum over all repeated blocks is below it are left out.
SMALLEST = 1e-4
# Limit for the flame graph of one rank. A page of eight ranks then stays below 3 MB.
MAX_CHARACTERS = 200_000


def tree(paths: Paths, times: Mapping[int, float]) -> Tree:
    """Returns the paths that took time as nested [name, own µs, children], in the host's order."""
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
    """Returns the tree without boxes that are too small to be seen. Their time goes to their parents.

    The same module of repeated blocks is kept or left out as a whole, by the sum over all blocks:
    in a model with many blocks, each of them is small.
    """
    sums: dict[tuple[str, ...], float] = defaultdict(float)

    def add(node: Tree, path: tuple[str, ...]) -> float:
        us: float = node[1] + sum(add(child, (*path, repeated(child[0]))) for child in node[2])
        sums[path] += us
        return us

    def kept(node: Tree, path: tuple[str, ...]) -> Tree:
        us, children = node[1], []
        for child in node[2]:
            child_path = (*path, repeated(child[0]))
            if sums[child_path] >= least:
                children.append(kept(child, child_path))
            else:
                us += _total_us(child)
        return [node[0], round(us, 3), children]

    least = SMALLEST * add(tree, ())
    result = kept(tree, ())
    while _num_characters(result) > MAX_CHARACTERS:
        least *= 3
        result = kept(tree, ())
    return result


def _num_characters(tree: Tree) -> int:
    return 20 + len(tree[0]) + sum(map(_num_characters, tree[2]))  # 20 for brackets and the number


def _total_us(tree: Tree) -> float:
    us: float = tree[1] + sum(map(_total_us, tree[2]))
    return us
