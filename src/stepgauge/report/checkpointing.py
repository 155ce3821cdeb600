"""Reports on activation checkpointing: bytes kept by formula, the best number of blocks per group,
and memory against time.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.report.figure import lines
from stepgauge.report.names import flatten, labels
from stepgauge.report.numbers import size_unit
from stepgauge.report.page import Plot
from stepgauge.report.table import Table
from stepgauge.spec.predictions import Row, paired
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB


@dataclasses.dataclass(frozen=True)
class BlockBytes:
    """Bytes that one block keeps, from a record that checkpoints every block and one that does not."""

    boundary: float  # the block's input: all that a checkpointed block keeps
    inside: float  # all that a block without checkpointing keeps

    def kept(self, layers: int, k: int, checkpointing: str = "blocks") -> float:
        """Returns the largest number of bytes kept at once with k blocks per group: the inputs of the
        L/k groups, and what the recomputed group keeps.

        blocks: ceil(L/k) boundary + k inside; nested: ceil(L/k) boundary + k boundary + inside.
        """
        within = k * self.inside if checkpointing == "blocks" else k * self.boundary + self.inside
        return math.ceil(layers / k) * self.boundary + within

    def best(self, layers: int, checkpointing: str = "blocks") -> int:
        """Returns the k with the least `kept`: about sqrt(L boundary / inside), nested about sqrt(L)."""
        return min(range(1, layers + 1), key=lambda k: (self.kept(layers, k, checkpointing), k))


def bytes_per_block(record: Record) -> float | None:
    """Returns the bytes that a block keeps for backward: the median, because the first and the last
    block differ.
    """
    kept = [int(size) for name, size in record.tables.get("saved_by_block", [])[1:] if str(name)]
    return statistics.median(kept) if kept else None


def block_bytes(records: Iterable[Record]) -> BlockBytes | None:
    """Returns the bytes per block from one model's records: one without checkpointing and one that
    checkpoints every block. None if either is missing.
    """
    sizes: dict[str, float] = {}
    for record in records:
        spec, kept = flatten(record.spec), bytes_per_block(record)
        if (
            kept is not None
            and spec["checkpointing"] in ("none", "blocks")
            and spec["checkpoint_blocks"] == 1
        ):
            sizes[spec["checkpointing"]] = kept
    if set(sizes) != {"none", "blocks"}:
        return None
    return BlockBytes(boundary=sizes["blocks"], inside=sizes["none"])


def best_checkpoint_tables(records: Sequence[Record]) -> list[Table]:
    """Returns a table per model: the peak of each kind of checkpointing, and the best k by formula."""
    tables = []
    groups = _by_model(paired(records))
    firsts = [dataclasses.replace(rows[0].shown, provenance="measured") for rows in groups]
    for name, group in zip(labels(firsts), groups, strict=True):
        sizes = block_bytes(row.shown for row in group)
        if sizes is None:
            continue
        layers = int(flatten(group[0].shown.spec)["num_layers"])
        unit = size_unit(row.shown.median("peak_bytes") for row in group)
        rows = []
        for row in sorted(group, key=lambda row: _order(row.shown)):
            choice, k = choice_of(row.shown)
            by_formula = choice in ("blocks", "nested")
            measured = row.shown.provenance == "measured"
            figures = {
                "kept by formula": sizes.kept(layers, k, choice) if by_formula else None,
                "peak": row.shown.median("peak_bytes") if measured else None,
                "predicted": row.prediction.median("peak_bytes") if row.prediction else None,
            }
            rows.append({
                "checkpointing": choice,
                "blocks per group": k if choice != "none" else None,
                **{f"{name} {unit.text}": unit.value(size) for name, size in figures.items()},
                "remark": "least by formula" if by_formula and k == sizes.best(layers, choice) else "",
            })  # fmt: skip
        best = {choice: sizes.best(layers, choice) for choice in ("blocks", "nested")}
        caption = (
            f"{name}: one block keeps {unit.format(sizes.inside)} for backward, its input is "
            f"{unit.format(sizes.boundary)}. By formula, the {layers} blocks keep least in groups of "
            f"{best['blocks']}, with nested checkpointing in groups of {best['nested']}."
        )
        tables.append(Table.from_rows(rows, caption=caption))
    return tables


def choice_of(record: Record) -> tuple[str, int]:
    """Returns the kind of checkpointing and the number of blocks per group."""
    spec = flatten(record.spec)
    return str(spec["checkpointing"]), int(spec["checkpoint_blocks"])


def _order(record: Record) -> tuple[bool, str, int]:
    choice, k = choice_of(record)
    return choice != "none", choice, k


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows that differ only in their checkpointing."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        spec = row.shown.spec
        rest = {n: v for n, v in spec.items() if n not in ("checkpointing", "checkpoint_blocks")}
        if row.shown.tables:
            groups.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    return list(groups.values())


def memory_against_time(points: Mapping[str, tuple[float, float]]) -> Plot:
    """Plots one point per kind of checkpointing: (step ms, peak bytes)."""
    curves = {name: ([ms], [size / GIB]) for name, (ms, size) in points.items()}
    return Plot(
        lines(curves, x="ms per step (median)", y="peak GiB", dots=tuple(curves)),
        "Peak memory against step time for each kind of checkpointing.",
    )
