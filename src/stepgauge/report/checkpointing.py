"""What activation checkpointing gives back: bytes a block by formula, the best k, memory against
time.
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
    """Bytes of one block, from a record with every block checkpointed and one with none."""

    boundary: float  # kept at a block's entry when it is computed again
    inside: float  # kept within one block when it is not

    def kept(self, layers: int, k: int, checkpointing: str = "blocks") -> float:
        """Largest bytes kept at once: the inputs of L/k parts and the insides of the part that runs
        again.

        blocks: ceil(L/k) boundary + k inside; nested: ceil(L/k) boundary + k boundary + inside.
        """
        within = k * self.inside if checkpointing == "blocks" else k * self.boundary + self.inside
        return math.ceil(layers / k) * self.boundary + within

    def best(self, layers: int, checkpointing: str = "blocks") -> int:
        """The k of least `kept`: near sqrt(L boundary / inside), nested near sqrt(L)."""
        return min(range(1, layers + 1), key=lambda k: (self.kept(layers, k, checkpointing), k))


def bytes_a_block(record: Record) -> float | None:
    """Kept for backward by a block: the median, since the first and the last keep more or less."""
    kept = [int(size) for name, size in record.tables.get("saved_by_block", [])[1:] if str(name)]
    return statistics.median(kept) if kept else None


def block_bytes(records: Iterable[Record]) -> BlockBytes | None:
    """Of records of one model without checkpointing and with every block; None if one lacks."""
    sizes: dict[str, float] = {}
    for record in records:
        spec, kept = flatten(record.spec), bytes_a_block(record)
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
    """A table a model: the peak of each checkpointing, and the k that the formula calls best."""
    tables = []
    groups = _by_model(paired(records))
    for name, group in zip(labels([group[0].shown for group in groups]), groups, strict=True):
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
                "blocks a part": k if choice != "none" else None,
                **{f"{name} {unit.text}": unit.value(size) for name, size in figures.items()},
                "remark": "least by formula" if by_formula and k == sizes.best(layers, choice) else "",
            })  # fmt: skip
        best = {choice: sizes.best(layers, choice) for choice in ("blocks", "nested")}
        caption = (
            f"{name}: a block keeps {unit.of(sizes.inside)} {unit.text}, its input "
            f"{unit.of(sizes.boundary)} {unit.text}. Of the {layers} blocks, by formula parts of "
            f"{best['blocks']} keep least, and nested ones of {best['nested']}."
        )
        tables.append(Table.from_rows(rows, caption=caption))
    return tables


def choice_of(record: Record) -> tuple[str, int]:
    """What is computed again, and how many blocks at a time."""
    spec = flatten(record.spec)
    return str(spec["checkpointing"]), int(spec["checkpoint_blocks"])


def _order(record: Record) -> tuple[bool, str, int]:
    choice, k = choice_of(record)
    return choice != "none", choice, k


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their checkpointing alone."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        spec = row.shown.spec
        rest = {n: v for n, v in spec.items() if n not in ("checkpointing", "checkpoint_blocks")}
        if row.shown.tables:
            groups.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    return list(groups.values())


def memory_against_time(points: Mapping[str, tuple[float, float]]) -> Plot:
    """A point a choice: (step ms, peak bytes)."""
    curves = {name: ([ms], [size / GIB]) for name, (ms, size) in points.items()}
    return Plot(
        lines(curves, x="ms a step (median)", y="peak GiB", dots=tuple(curves)),
        "Memory against time: what each checkpointing saves and what it costs.",
    )
