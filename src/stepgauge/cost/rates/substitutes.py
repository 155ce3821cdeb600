"""Times of operations of which no or few shapes were timed, from those of other operations.

How fast attention is for its FLOPs depends on the shape: few heads do not fill the multiprocessors, and short
sequences are mostly latency and half-masked tiles. All causal kernels have that in common.
"""

import dataclasses
import statistics
from collections.abc import Mapping

from stepgauge.spec.calibration import ALONE, FULL_MASK, OperationTable

Tables = Mapping[str, OperationTable]

MANY, CUDNN, FEW = "sdpa", "sdpa-cudnn", ("triton", "sdpa-flash", "sdpa-cudnn")
# sdpa runs cuDNN's kernel if their times at common shapes differ by less than this fraction.
SAME_WITHIN = 0.05
# Both read a gradient and read and write three tensors in fp32. On an H100, the update of master weights,
# which also writes bf16 weights, takes 1.02 times as long.
MASTER, UPDATE = "optimizer fused master", "optimizer fused fp32"


def reference_of(operation: str) -> str:
    """Returns the attention of which many shapes were timed, for one of which few were; otherwise ""."""
    kind, *words = operation.split()
    if kind != "attention" or words[0] not in FEW or FULL_MASK in operation:
        return ""
    return " ".join((kind, MANY, *words[1:3]))


def with_substitutes(tables: Tables) -> dict[str, OperationTable]:
    """Returns the tables, with those that the file lacks and another operation has."""
    substitutes = {MASTER: tables[UPDATE]} if UPDATE in tables else {}
    return {**substitutes, **tables, **_longer_attention(tables)}


def _longer_attention(tables: Tables) -> dict[str, OperationTable]:
    """Returns sdpa's tables with cuDNN's times of longer sequences, where sdpa runs cuDNN's kernel."""
    longer = {}
    for direction in ("forward", "backward"):
        sdpa, cudnn = (f"attention {name} {direction} bf16" for name in (MANY, CUDNN))
        if not _are_same(tables, sdpa, cudnn):
            continue
        for suffix in ("", f" {ALONE}"):
            own, other = tables.get(sdpa + suffix), tables.get(cudnn + suffix)
            if own and other:
                longest = max(row[1] for row in own.rows)
                added = tuple(row for row in other.rows if row[1] > longest)
                longer[sdpa + suffix] = dataclasses.replace(own, rows=own.rows + added)
    return longer


def _are_same(tables: Tables, operation: str, other: str) -> bool:
    """Returns True if both take the same time at the shapes that both have."""
    if operation not in tables or other not in tables:
        return False
    times = {row[:-1]: row[-1] for row in tables[operation].rows}
    ratios = [row[-1] / times[row[:-1]] for row in tables[other].rows if row[:-1] in times]
    return bool(ratios) and abs(statistics.median(ratios) - 1) < SAME_WITHIN
