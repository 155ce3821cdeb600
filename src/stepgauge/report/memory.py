"""Records of kind "memory" as tables and timelines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.checkpointing import best_checkpoint_tables, bytes_a_block
from stepgauge.report.figure import areas
from stepgauge.report.names import SHAPE, describe, flatten, labels, shared_values
from stepgauge.report.numbers import SizeUnit, size_unit
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.table import Table
from stepgauge.report.views import record_table
from stepgauge.spec.hardware import fits
from stepgauge.spec.memory import CATEGORIES
from stepgauge.spec.predictions import Row, paired
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.spec.units import ceil_div

SHOWN = (
    "peak_bytes",
    "predicted_peak_bytes",
    "predicted_error",
    "forward_only_peak_bytes",
    *(f"{name.replace(' ', '_')}_bytes" for name in CATEGORIES),
    "unexplained_bytes",
    "saved_for_backward_bytes",
)
SAME_COUNT = (
    "On a CPU one tracker counts the peak and predicts it: that they agree is no test of the "
    "prediction. On a GPU the allocator counts."
)
PHASES = ("forward only", "forward", "backward", "optimizer")
POINTS_DRAWN = 350
LEAST_SHARED = 0.2  # of a scale that timelines share
LARGEST_SHOWN = 10
SAVERS_SHOWN = 5
ONE_SHAPE = ("content", "size", *SHAPE, "batch", "context_length", "precision")
OUTSIDE = "outside of blocks"


def summary_table(records: Sequence[Record], caption: str = "") -> Table:
    """One row a thing asked: measured peak, predicted peak, their error, and whose bytes it is.

    What is predicted alone says so, and which device of that architecture holds it.
    """
    pairs = paired(records)
    unit = _unit(records)
    table = record_table([_shown(pair, unit) for pair in pairs])
    at = table.name_columns().stop
    shown = [pair.shown for pair in pairs]
    common = shared_values(shown).text if len(shown) > 1 else ""
    figures = ["predicted" if record.provenance == "modelled" else "measured" for record in shown]
    held = [_holds(record) for record in shown]
    # which figures are predicted is said in a column
    names = labels([dataclasses.replace(record, provenance="measured") for record in shown])
    columns = ["row", *table.columns[:at], "figures", "fits", *table.columns[at:]]
    rows = [
        [name, *row[:at], of, holds, *row[at:]]
        for name, row, of, holds in zip(names, table.rows, figures, held, strict=True)
    ]
    same = figures[:1] if len(set(figures)) == 1 else []
    said = ", ".join(filter(None, (common, *same)))
    found = dataclasses.replace(
        table,
        columns=columns,
        rows=rows,
        caption=": ".join(filter(None, (caption, said))),
        hidden=frozenset([*table.columns[:at], "provenance", *(["figures"] if same else [])]),
        names=None,
    )
    return found if any(held) else found.of([n for n, c in enumerate(columns) if c != "fits"])


def _holds(record: Record) -> str:
    peak = record.median("peak_bytes")
    modelled = record.provenance == "modelled"
    return fits(peak, str(record.spec["predict"])) if modelled and peak else ""


def _unit(records: Sequence[Record]) -> SizeUnit:
    """What all sizes of the records are written in, so that they can be compared and added up."""
    return size_unit(
        record.median(name) for record in records for name in SHOWN if name.endswith("_bytes")
    )


def peak_error(row: Row) -> float | None:
    """Signed fraction of a peak that an allocator measured; None where a tracker counted it."""
    measured_by_allocator = str(row.record.spec.get("device", "")).startswith("cuda")
    return row.error("peak_bytes") if measured_by_allocator else None


def _shown(pair: Row, unit: SizeUnit) -> Record:
    """The row as a record with the columns' metrics: what is predicted alone has no measured peak."""
    record, prediction = pair.shown, pair.prediction
    known = {name: sample for name, sample in record.metrics.items() if name in SHOWN}
    if record is prediction:
        known.pop("peak_bytes", None)
    if prediction and "peak_bytes" in prediction.metrics:
        known["predicted_peak_bytes"] = prediction.metrics["peak_bytes"]
    if (error := peak_error(pair)) is not None:
        known["predicted_error"] = Sample.exact(error, "signed fraction")
    metrics = dict(_in_unit(name, known[name], unit) for name in SHOWN if name in known)
    notes = [pair.record.note]
    if prediction and prediction.note and prediction is not pair.record:
        notes.append(f"not predicted: {prediction.note}")
    note = "; ".join(filter(None, notes))
    return dataclasses.replace(record, metrics=metrics, status=pair.record.status, note=note)


def _in_unit(name: str, sample: Sample, unit: SizeUnit) -> tuple[str, Sample]:
    if sample.unit != "bytes":
        return name, sample
    return f"{name.removesuffix('_bytes')}_{unit.text}", Sample.exact(
        sample.median / unit.bytes, unit.text
    )


def memory_tables(record: Record, *, name: str = "") -> list[Table]:
    """Who holds the peak, who keeps for backward, and the sizes that follow from the shape; with the
    row's name in each caption, where it is given.
    """
    if not record.tables:
        return []
    tables = [
        phases_table(record),
        _table(record, "at_the_peak", LARGEST_SHOWN, "the largest at the peak"),
        _table(record, "savers", SAVERS_SHOWN, "what is kept for backward, all blocks together"),
        blocks_table(record),
        derived_table(record),
    ]
    return [
        dataclasses.replace(table, caption=_captioned(name, table.caption))
        for table in tables
        if table.rows
    ]


def _captioned(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text[0].upper() + text[1:]


def _largest(record: Record, which: str, most: int) -> tuple[list[str], list[list[Any]]]:
    """Headings and first rows of a record's table, bytes last; none where it has no such table."""
    head, *rows = record.tables.get(which, [["bytes"]])
    shown = [list(row) for row in rows[:most]]
    for column, name in enumerate(head):
        if name in ("module", "kept by"):
            for row in shown:
                row[column] = row[column] or OUTSIDE
    return head, shown


def _table(record: Record, which: str, most: int, caption: str) -> Table:
    head, rows = _largest(record, which, most)
    unit = _unit([record])
    shown = [[*row[:-1], unit.value(row[-1])] for row in rows]
    return Table([*head[:-1], unit.text], shown, caption=caption)


def kept_tables(records: Sequence[Record], *, largest: bool = True) -> list[Table]:
    """What rows of one shape and precision keep for backward: a block, all, the five `largest`."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if "savers" in record.tables:
            spec = flatten(record.spec)
            groups.setdefault(tuple(spec.get(name) for name in ONE_SHAPE), []).append(record)
    tables = [table for group in groups.values() if len(group) > 1 for table in _kept_tables(group)]
    return tables if largest else tables[::2]


def _kept_tables(found: Sequence[Record]) -> tuple[Table, Table]:
    common, rows = shared_values(found).text, labels(found)
    unit = _unit(found)
    sizes, savers = [], []
    for name, record in zip(rows, found, strict=True):
        whole = record.median("saved_for_backward_bytes") or 0.0
        of_block = unit.value(bytes_a_block(record))
        sizes.append(
            {"row": name, f"a block {unit.text}": of_block, f"all {unit.text}": unit.value(whole)}
        )
        for module, operator, line, tensors, size in _largest(record, "savers", SAVERS_SHOWN)[1]:
            savers.append({
                "row": name, unit.text: unit.value(size), "of all %": 100 * size / whole if whole else None,
                "tensors": tensors, "made by": operator, "kept by": module, "line": line,
            })  # fmt: skip
            name = ""  # once for the five
    kept = f"{common}: kept for backward, by a block and in all"
    most = f"{common}: the five that keep most for backward, all blocks together"
    return Table.from_rows(sizes, caption=kept), Table.from_rows(
        savers, caption=most, formats={"of all %": ".1f"}
    )


def phases_table(record: Record) -> Table:
    """The peak of forward alone without gradients, and of each phase of the step."""
    peaks = {phase: record.median(f"{phase.replace(' ', '_')}_peak_bytes") for phase in PHASES}
    unit = _unit([record])
    rows = [
        {"phase": phase, f"peak {unit.text}": unit.value(peak)}
        for phase, peak in peaks.items()
        if peak is not None
    ]
    return Table.from_rows(rows, caption="peak of each phase")


def blocks_table(record: Record) -> Table:
    """Bytes kept by block; equal blocks between the first and the last are one row."""
    rows = [(str(name) or OUTSIDE, int(size)) for name, size in record.tables["saved_by_block"][1:]]
    merged: list[tuple[str, str, int]] = []
    for name, size in rows:
        if merged and merged[-1][2] == size and name != OUTSIDE:
            merged[-1] = merged[-1][0], name, size
        else:
            merged.append((name, name, size))
    unit = _unit([record])
    shown = [
        {"part": a if a == b else f"{a} to {b.rpartition('.')[2]}", unit.text: unit.value(size)}
        for a, b, size in merged
    ]
    return Table.from_rows(shown, caption="kept for backward, each", folded=len(shown) > 8)


def derived_table(record: Record) -> Table:
    """Sizes that follow from the shape: the residual stream's, and full attention's quadratic term."""
    spec = flatten(record.spec)
    if spec.get("own") or spec.get("network") == "user":
        return Table([], [])
    batch, length, width, heads = (
        int(spec[n]) for n in ("batch", "context_length", "d_model", "num_heads")
    )
    stream, scores = batch * length * width * 4, batch * heads * length**2 * 4
    unit = _unit([record])
    rows = [
        ["residual stream, fp32", f"{batch} × {length} × {width} × 4 B", unit.value(stream)],
        ["one layer's full score matrices, fp32", f"{batch} × {heads} × {length}² × 4 B", unit.value(scores)],
    ]  # fmt: skip
    caption = "sizes by formula (fused attention never holds the score matrices)"
    return Table(["tensor", "size", unit.text], rows, caption=caption)


def timeline(
    record: Record, prediction: Record | None = None, *, beside: Sequence[Record] = ()
) -> Plot | None:
    """Active bytes over the step's allocations and frees, by category, the phases marked. On one
    scale with the timelines `beside` it, unless it would be too low to read.
    """
    series = record.series
    if "event" not in series:
        return None
    points = _highest_of_stretches(series)
    highest = max(map(_highest, [record, *beside]))
    shared = _highest(record) >= LEAST_SHARED * highest
    unit = _unit([record, *beside] if shared else [record])
    layers = {
        name: [series[name.replace(" ", "_")][i] / unit.bytes for i in points]
        for name in CATEGORIES
    }
    starts = dict(zip(TRAINING_PHASES, series["phase_start"], strict=True))
    predicted = prediction.median("peak_bytes") if prediction and prediction != record else None
    level = ("predicted peak", predicted / unit.bytes) if predicted else None
    svg = areas(
        [series["event"][i] for i in points],
        layers,
        unit=unit.text,
        x_label="allocations and frees of one step",
        marks=starts,
        level=level,
        most=highest / unit.bytes if shared else 0.0,
    )
    whole = "predicted" if record.provenance == "modelled" else "tracked"
    name = describe(record).removeprefix(f"{record.kind} ")
    return Plot(svg, f"{name}: memory in use over one step, {whole}.")


def _highest(record: Record) -> float:
    """Bytes at the top of its timeline; 0 without one."""
    curves = [record.series.get(name.replace(" ", "_"), []) for name in CATEGORIES]
    return max(map(sum, zip(*curves, strict=True)), default=0.0)


def _highest_of_stretches(series: Mapping[str, Sequence[float]]) -> list[int]:
    """At most POINTS_DRAWN places of the curves, of each stretch the highest."""
    curves = [series[name.replace(" ", "_")] for name in CATEGORIES]
    totals = [sum(values) for values in zip(*curves, strict=True)]
    stretch = ceil_div(len(totals), POINTS_DRAWN)
    highest = []
    for start in range(0, len(totals), stretch):
        places = range(start, min(start + stretch, len(totals)))
        highest.append(max(places, key=totals.__getitem__))
    return highest


def memory_blocks(
    records: Sequence[Record],
    *,
    drawn: Sequence[Record] | None = None,
    compared: Sequence[Record] | None = None,
) -> list[Block]:
    """The report of these records: timelines of those `drawn`, what those `compared` keep."""
    rows = paired(records)
    predictions = {row.shown.key: row.prediction for row in rows}
    every = [row.shown for row in rows]
    if drawn is None:
        drawn = every
    if compared is None:
        compared = every
    shown: list[Block] = [summary_table(records, "Peak of the last step, and whose bytes it is")]
    if said := _errors_said(rows):
        shown.append(Text(said))
    for record in drawn:
        plot = timeline(record, predictions.get(record.key), beside=drawn)
        if plot:
            shown.append(plot)
        name = describe(record) if len(drawn) > 1 and not plot else ""  # else the plot names it
        tables = memory_tables(record, name=name)
        shown += [dataclasses.replace(table, folded=True) for table in tables]
    return [*shown, *kept_tables(compared), *best_checkpoint_tables(records)]


def _errors_said(rows: Sequence[Row]) -> str:
    """How far predicted peaks are off, or why that says nothing."""
    errors = [abs(error) for row in rows if (error := peak_error(row)) is not None]
    if errors:
        over = "1 row" if len(errors) == 1 else f"{len(errors)} rows"
        return f"Largest error of the predicted peak: {100 * max(errors):.2f} % over {over}."
    return SAME_COUNT if any(row.error("peak_bytes") is not None for row in rows) else ""
