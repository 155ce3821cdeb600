"""Records of kind "memory" as tables, timelines and the choice of a checkpointing."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.report.figure import areas, lines
from stepgauge.report.page import Block, Plot, Section, Text, page
from stepgauge.report.table import Table
from stepgauge.report.views import describe, flatten, number, record_table
from stepgauge.spec.record import Record

GIB = 2**30
CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "other")
SHOWN = (
    "peak_bytes",
    "predicted_peak_bytes",
    "predicted_error",
    "forward_only_peak_bytes",
    *(f"{name.replace(' ', '_')}_bytes" for name in CATEGORIES),
    "unexplained_bytes",
    "saved_for_backward_bytes",
)
POINTS_DRAWN = 350
LARGEST_SHOWN = 10
SAVERS_SHOWN = 5


def summary_table(records: Sequence[Record], caption: str = "") -> Table:
    """One row a record: peak, prediction, and whose bytes the peak is."""
    kept = [
        dataclasses.replace(record, metrics={name: record.metrics[name] for name in SHOWN if name in record.metrics})
        for record in records
    ]
    return dataclasses.replace(record_table(kept), caption=caption)


def memory_tables(record: Record) -> list[Table]:
    """Who holds the peak, who keeps for backward, and the sizes behind it that follow from the shape."""
    if not record.tables:
        return []
    name = describe(record)
    return [
        _table(record, "at_the_peak", LARGEST_SHOWN, f"{name}: the largest at the peak"),
        _table(record, "savers", SAVERS_SHOWN, f"{name}: what is kept for backward, all blocks together"),
        blocks_table(record),
        derived_table(record),
    ]


def _table(record: Record, which: str, rows: int, caption: str) -> Table:
    head, *body = record.tables[which]
    shown = [[*map(str, row[:-1]), number(row[-1], "bytes")] for row in body[:rows]]
    return Table([*head[:-1], "GiB"], shown, numeric=frozenset(("GiB", "tensors")), caption=caption)


def blocks_table(record: Record) -> Table:
    """Bytes kept by block; the blocks between the first and the last that keep the same are one row."""
    rows = [(str(name) or "outside of blocks", int(size)) for name, size in record.tables["saved_by_block"][1:]]
    merged: list[tuple[str, str, int]] = []
    for name, size in rows:
        if merged and merged[-1][2] == size and name != "outside of blocks":
            merged[-1] = merged[-1][0], name, size
        else:
            merged.append((name, name, size))
    shown = [[a if a == b else f"{a} to {b.rpartition('.')[2]}", number(size, "bytes")] for a, b, size in merged]
    caption = f"{describe(record)}: kept for backward, each"
    return Table(["part", "GiB"], shown, numeric=frozenset(("GiB",)), caption=caption, folded=len(shown) > 8)


def derived_table(record: Record) -> Table:
    """Sizes that follow from the shape: the residual stream's, and full attention's quadratic term."""
    spec = flatten(record.spec)
    if spec.get("own"):
        return Table(["tensor", "size", "GiB"], [])
    batch, length, width, heads = (int(spec[n]) for n in ("batch", "context_length", "d_model", "num_heads"))
    stream, scores = batch * length * width * 4, batch * heads * length**2 * 4
    rows = [
        ["residual stream, fp32", f"{batch} × {length} × {width} × 4 B", number(stream, "bytes")],
        ["one layer's full score matrices, fp32", f"{batch} × {heads} × {length}² × 4 B", number(scores, "bytes")],
    ]
    caption = f"{describe(record)}: sizes by formula (fused attention never holds the score matrices)"
    return Table(["tensor", "size", "GiB"], rows, numeric=frozenset(("GiB",)), caption=caption)


def timeline(record: Record) -> Plot | None:
    """Active bytes over the step's allocations and frees, by category, the phases marked."""
    series = record.series
    if "event" not in series:
        return None
    points = _highest_of_stretches(series)
    layers = {name: [series[name.replace(" ", "_")][i] / GIB for i in points] for name in CATEGORIES}
    starts = dict(zip(("forward", "backward", "optimizer"), series["phase_start"], strict=True))
    predicted = record.median("predicted_peak_bytes")
    level = ("predicted peak", predicted / GIB) if predicted and record.provenance == "measured" else None
    svg = areas(
        [series["event"][i] for i in points],
        layers,
        unit="GiB",
        x_label="allocations and frees of one step",
        marks=starts,
        level=level,
    )
    whole = "predicted" if record.provenance == "modelled" else "followed"
    return Plot(svg, f"{describe(record)}: memory in use over one step, {whole}.")


def _highest_of_stretches(series: Mapping[str, Sequence[float]]) -> list[int]:
    """At most POINTS_DRAWN places of the curves, of each stretch the highest."""
    totals = [sum(values) for values in zip(*(series[n.replace(" ", "_")] for n in CATEGORIES), strict=True)]
    stretch = -(-len(totals) // POINTS_DRAWN)
    stretches = [range(start, min(start + stretch, len(totals))) for start in range(0, len(totals), stretch)]
    return [max(places, key=totals.__getitem__) for places in stretches]


def memory_blocks(records: Sequence[Record], *, drawn: Sequence[Record] | None = None) -> list[Block]:
    """What a report shows of these records; timelines of those `drawn`, else of all."""
    shown: list[Block] = [summary_table(records, "Peak of the last step, and whose bytes it is")]
    errors = [abs(r.median("predicted_error") or 0.0) for r in records if "predicted_error" in r.metrics]
    if errors:
        shown.append(Text(f"Largest error of the predicted peak: {100 * max(errors):.2f} % over {len(errors)} rows."))
    for record in records if drawn is None else drawn:
        plot = timeline(record)
        shown += [plot] if plot else []
        shown += [dataclasses.replace(table, folded=True) for table in memory_tables(record) if table.rows]
    return shown + list(best_checkpoint_tables(records))


def memory_page(records: Sequence[Record]) -> str:
    """A report of these records alone."""
    section = Section("Memory", "Who holds memory when, and what is the peak?", memory_blocks(records))
    where = records[0].environment
    facts = {name: str(where[name]) for name in ("device", "torch", "commit") if where.get(name)}
    return page("stepgauge profile memory", [section], facts=facts)


@dataclasses.dataclass(frozen=True)
class BlockBytes:
    """What one block weighs, read off two records of a model: with every block checkpointed and with none."""

    boundary: float  # kept at a block's entry when it is computed again
    inside: float  # kept within one block when it is not

    def kept(self, layers: int, k: int, checkpointing: str = "blocks") -> float:
        """Largest bytes kept at once: the inputs of L/k parts and the insides of the part that runs again.

        blocks: ceil(L/k) boundary + k inside; nested: ceil(L/k) boundary + k boundary + inside.
        """
        within = k * self.inside if checkpointing == "blocks" else k * self.boundary + self.inside
        return math.ceil(layers / k) * self.boundary + within

    def best(self, layers: int, checkpointing: str = "blocks") -> int:
        """The k of least `kept`: near sqrt(L boundary / inside) for blocks, near sqrt(L) for nested."""
        return min(range(1, layers + 1), key=lambda k: (self.kept(layers, k, checkpointing), k))


def block_bytes(records: Iterable[Record]) -> BlockBytes | None:
    """From the records of one model without checkpointing and with every block checkpointed, if both are there."""
    sizes: dict[str, float] = {}
    for record in records:
        spec = flatten(record.spec)
        kept = [int(size) for name, size in record.tables.get("saved_by_block", [])[1:] if str(name)]
        if kept and spec["checkpointing"] in ("none", "blocks") and spec["checkpoint_blocks"] == 1:
            sizes[spec["checkpointing"]] = statistics.median(kept)  # the first and the last keep more or less
    if set(sizes) != {"none", "blocks"}:
        return None
    return BlockBytes(boundary=sizes["blocks"], inside=sizes["none"])


def best_checkpoint_tables(records: Sequence[Record]) -> list[Table]:
    """Of each model that was run with several checkpointings: peak of each, and the k that the formula calls best."""
    tables = []
    for name, group in _by_model(records).items():
        sizes = block_bytes(group)
        if sizes is None:
            continue
        layers = int(flatten(group[0].spec)["num_layers"])
        rows = []
        for record in sorted(group, key=_choice):
            choice, k = _choice(record)
            by_formula = choice in ("blocks", "nested")
            figures = [sizes.kept(layers, k, choice) if by_formula else None]
            figures += [record.median("peak_bytes"), record.median("predicted_peak_bytes")]
            remark = "least by formula" if by_formula and k == sizes.best(layers, choice) else ""
            part = str(k) if choice != "none" else ""
            rows.append([choice, part, *(number(figure, "bytes") for figure in figures), remark])
        columns = ["checkpointing", "blocks a part", "kept by formula GiB", "peak GiB", "predicted GiB", "remark"]
        best = {choice: sizes.best(layers, choice) for choice in ("blocks", "nested")}
        caption = (
            f"{name}: a block keeps {number(sizes.inside, 'bytes')} GiB, its input "
            f"{number(sizes.boundary, 'bytes')} GiB; of {layers} blocks the formula takes parts of {best['blocks']}, "
            f"nested of {best['nested']}"
        )
        tables.append(Table(columns, rows, numeric=frozenset(columns[1:5]), caption=caption))
    return tables


def _choice(record: Record) -> tuple[str, int]:
    spec = flatten(record.spec)
    return str(spec["checkpointing"]), int(spec["checkpoint_blocks"])


def _by_model(records: Sequence[Record]) -> Mapping[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        spec = {**record.spec, "checkpointing": "none"}
        if record.tables:
            key = " ".join([describe(dataclasses.replace(record, spec=spec)), *_unusual(spec)])
            groups.setdefault(key, []).append(record)
    return groups


def _unusual(spec: Mapping[str, Any]) -> list[str]:
    flat = flatten(spec)
    return [str(flat[name]) for name in ("attention", "loss", "norm", "optimizer", "predict") if name in flat]


def memory_against_time(points: Mapping[str, tuple[float, float]]) -> Plot:
    """A point a choice: (step ms, peak bytes)."""
    curves = {name: ([ms], [size / GIB]) for name, (ms, size) in points.items()}
    return Plot(
        lines(curves, x="ms a step (median)", y="peak GiB", dots=tuple(curves)),
        "Memory against time: what each checkpointing saves and what it costs.",
    )


def dtype_table(found: Sequence[tuple[str, str, str, str]], *, each: bool) -> Table:
    """(what, path, module, dtype), the same place in every block as one row unless `each`."""
    counts: dict[tuple[str, ...], int] = {}
    for what, path, module, dtype in found:
        row = (what, path if each else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), module, dtype)
        counts[row] = counts.get(row, 0) + 1
    rows = [[*row, str(count)] for row, count in counts.items()]
    return Table(["what", "where", "module", "type", "tensors"], rows, numeric=frozenset(("tensors",)))
