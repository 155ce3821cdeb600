"""Reports on records of kind "memory": tables and timelines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.checkpointing import best_checkpoint_tables, bytes_per_block
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
    "On a CPU, the same tracker counts and predicts the peak, so their agreement does not test the "
    "prediction. On a GPU, the peak is counted by the allocator."
)
PHASES = ("forward only", "forward", "backward", "optimizer")
MAX_POINTS = 350  # of a timeline
MIN_OF_SHARED_SCALE = 0.2  # a timeline that would be lower has its own scale
MAX_LARGEST = 10
MAX_SAVERS = 5
SAME_WORK = ("content", "size", *SHAPE, "batch", "context_length", "precision")
OUTSIDE = "outside of blocks"


def summary_table(records: Sequence[Record], caption: str = "") -> Table:
    """Returns one row per spec: the measured and the predicted peak, their error, and the peak's
    categories.

    A row that was only predicted says so, and names a device of its architecture that has room.
    """
    pairs = paired(records)
    unit = _unit(records)
    table = record_table([_with_columns(pair, unit) for pair in pairs])
    at = table.name_columns().stop
    shown = [pair.shown for pair in pairs]
    common = shared_values(shown).text if len(shown) > 1 else ""
    figures = ["predicted" if record.provenance == "modelled" else "measured" for record in shown]
    devices = [_fitting_device(record) for record in shown]
    # The column "figures" has the provenance, so the labels need not.
    names = labels([dataclasses.replace(record, provenance="measured") for record in shown])
    columns = ["row", *table.columns[:at], "figures", "fits", *table.columns[at:]]
    rows = [
        [name, *row[:at], kind, device, *row[at:]]
        for name, row, kind, device in zip(names, table.rows, figures, devices, strict=True)
    ]
    same = figures[:1] if len(set(figures)) == 1 else []
    details = ", ".join(filter(None, (common, *same)))
    summary = dataclasses.replace(
        table,
        columns=columns,
        rows=rows,
        caption=": ".join(filter(None, (caption, details))),
        hidden=frozenset([*table.columns[:at], "provenance", *(["figures"] if same else [])]),
        names=None,
    )
    if any(devices):
        return summary
    return summary.select([place for place, name in enumerate(columns) if name != "fits"])


def _fitting_device(record: Record) -> str:
    peak = record.median("peak_bytes")
    modelled = record.provenance == "modelled"
    return fits(peak, str(record.spec["predict"])) if modelled and peak else ""


def _unit(records: Sequence[Record]) -> SizeUnit:
    """Returns one unit for all sizes of the records, so that they can be compared and added up."""
    return size_unit(
        record.median(name) for record in records for name in SHOWN if name.endswith("_bytes")
    )


def peak_error(row: Row) -> float | None:
    """Returns the signed relative error of the predicted peak, or None on a CPU, where the tracker
    that predicts the peak also counts it.
    """
    is_counted_by_allocator = str(row.record.spec.get("device", "")).startswith("cuda")
    return row.error("peak_bytes") if is_counted_by_allocator else None


def _with_columns(pair: Row, unit: SizeUnit) -> Record:
    """Returns the row as one record whose metrics are the summary's columns."""
    record, prediction = pair.shown, pair.prediction
    samples = {name: sample for name, sample in record.metrics.items() if name in SHOWN}
    if record is prediction:
        samples.pop("peak_bytes", None)
    if prediction and "peak_bytes" in prediction.metrics:
        samples["predicted_peak_bytes"] = prediction.metrics["peak_bytes"]
    if (error := peak_error(pair)) is not None:
        samples["predicted_error"] = Sample.exact(error, "signed fraction")
    metrics = dict(_in_unit(name, samples[name], unit) for name in SHOWN if name in samples)
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
    """Returns tables of one record: phases, the largest tensors at the peak, what is kept for backward,
    and sizes by formula. `name` is put before each caption.
    """
    if not record.tables:
        return []
    tables = [
        phases_table(record),
        _largest_table(record, "at_the_peak", MAX_LARGEST, "largest tensors at the peak"),
        _largest_table(record, "savers", MAX_SAVERS, "kept for backward, summed over all blocks"),
        blocks_table(record),
        derived_table(record),
    ]
    captions = [
        f"{name}: {table.caption}" if name else table.caption[:1].upper() + table.caption[1:]
        for table in tables
    ]
    return [
        dataclasses.replace(table, caption=caption)
        for table, caption in zip(tables, captions, strict=True)
        if table.rows
    ]


def _largest(record: Record, table: str, most: int) -> tuple[list[str], list[list[Any]]]:
    """Returns the headings and first rows of one of the record's tables; no rows if it has none."""
    head, *rows = record.tables.get(table, [["bytes"]])
    shown = [list(row) for row in rows[:most]]
    for column, name in enumerate(head):
        if name in ("module", "kept by"):
            for row in shown:
                row[column] = row[column] or OUTSIDE
    return head, shown


def _largest_table(record: Record, table: str, most: int, caption: str) -> Table:
    head, rows = _largest(record, table, most)
    unit = _unit([record])
    shown = [[*row[:-1], unit.value(row[-1])] for row in rows]  # the last column is bytes
    return Table([*head[:-1], unit.text], shown, caption=caption)


def kept_tables(records: Sequence[Record], *, largest: bool = True) -> list[Table]:
    """Compares what is kept for backward by records with the same work: one table of sizes, and with
    `largest` one of the five largest contributions.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if "savers" in record.tables:
            spec = flatten(record.spec)
            groups.setdefault(tuple(spec.get(name) for name in SAME_WORK), []).append(record)
    compared = [group for group in groups.values() if len(group) > 1]
    tables = []
    for group in compared:
        tables.append(_kept_sizes(group))
        if largest:
            tables.append(_kept_largest(group))
    return tables


def _kept_sizes(records: Sequence[Record]) -> Table:
    unit = _unit(records)
    rows = [
        {
            "row": name,
            f"per block {unit.text}": unit.value(bytes_per_block(record)),
            f"total {unit.text}": unit.value(record.median("saved_for_backward_bytes") or 0.0),
        }
        for name, record in zip(labels(records), records, strict=True)
    ]
    return Table.from_rows(rows, caption=f"{shared_values(records).text}: kept for backward")


def _kept_largest(records: Sequence[Record]) -> Table:
    unit = _unit(records)
    rows = []
    for name, record in zip(labels(records), records, strict=True):
        total = record.median("saved_for_backward_bytes")
        for module, operator, line, tensors, size in _largest(record, "savers", MAX_SAVERS)[1]:
            rows.append({
                "row": name, unit.text: unit.value(size), "of total %": 100 * size / total if total else None,
                "tensors": tensors, "made by": operator, "kept by": module, "line": line,
            })  # fmt: skip
            name = ""  # only in the first row of a record
    common = shared_values(records).text
    caption = f"{common}: the five largest contributions to what is kept, summed over all blocks"
    return Table.from_rows(rows, caption=caption, formats={"of total %": ".1f"})


def phases_table(record: Record) -> Table:
    """Returns the peak of a forward pass without gradients, and of each phase of the step."""
    peaks = {phase: record.median(f"{phase.replace(' ', '_')}_peak_bytes") for phase in PHASES}
    unit = _unit([record])
    rows = [
        {"phase": phase, f"peak {unit.text}": unit.value(peak)}
        for phase, peak in peaks.items()
        if peak is not None
    ]
    return Table.from_rows(rows, caption="peak of each phase")


def blocks_table(record: Record) -> Table:
    """Returns the bytes kept by each block. Consecutive blocks that keep the same are one row."""
    rows = [(str(name) or OUTSIDE, int(size)) for name, size in record.tables["saved_by_block"][1:]]
    merged: list[tuple[str, str, int]] = []
    for name, size in rows:
        if merged and merged[-1][2] == size and name != OUTSIDE:
            merged[-1] = merged[-1][0], name, size
        else:
            merged.append((name, name, size))
    unit = _unit([record])
    shown = [
        {"block": a if a == b else f"{a} to {b.rpartition('.')[2]}", unit.text: unit.value(size)}
        for a, b, size in merged
    ]
    return Table.from_rows(shown, caption="kept for backward by each block", folded=len(shown) > 8)


def derived_table(record: Record) -> Table:
    """Returns sizes computed from the shape: of the residual stream and of full attention's scores."""
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
    caption = "sizes by formula (fused attention never stores the score matrices)"
    return Table(["tensor", "size", unit.text], rows, caption=caption)


def timeline(
    record: Record, prediction: Record | None = None, *, beside: Sequence[Record] = ()
) -> Plot | None:
    """Returns a plot of active bytes by category over the step's allocations and frees, or None if the
    record has no timeline. It shares its scale with the timelines of `beside`, unless it would be too
    low to read.
    """
    series = record.series
    if "event" not in series:
        return None
    points = _sampled(series)
    highest = max(map(_peak, [record, *beside]))
    shared = _peak(record) >= MIN_OF_SHARED_SCALE * highest
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
        scale_end=highest / unit.bytes if shared else 0.0,
    )
    kind = "predicted" if record.provenance == "modelled" else "tracked"
    name = describe(record).removeprefix(f"{record.kind} ")
    return Plot(svg, f"{name}: memory in use over one step, {kind}.")


def _peak(record: Record) -> float:
    """Returns the highest point of the record's timeline in bytes, 0 without a timeline."""
    curves = [record.series.get(name.replace(" ", "_"), []) for name in CATEGORIES]
    return max(map(sum, zip(*curves, strict=True)), default=0.0)


def _sampled(series: Mapping[str, Sequence[float]]) -> list[int]:
    """Returns at most MAX_POINTS positions of the timeline: the highest of each stretch."""
    curves = [series[name.replace(" ", "_")] for name in CATEGORIES]
    totals = [sum(values) for values in zip(*curves, strict=True)]
    stretch = ceil_div(len(totals), MAX_POINTS)
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
    """Returns the blocks of a memory section. By default all records are drawn as timelines and
    compared in what they keep for backward; `drawn` and `compared` select some.
    """
    rows = paired(records)
    predictions = {row.shown.key: row.prediction for row in rows}
    every = [row.shown for row in rows]
    drawn = every if drawn is None else drawn
    compared = every if compared is None else compared
    blocks: list[Block] = [summary_table(records, "Peak of the last step, by category")]
    if sentence := _error_sentence(rows):
        blocks.append(Text(sentence))
    for record in drawn:
        plot = timeline(record, predictions.get(record.key), beside=drawn)
        if plot:
            blocks.append(plot)
        name = describe(record) if len(drawn) > 1 and not plot else ""  # else the plot names it
        tables = memory_tables(record, name=name)
        blocks += [dataclasses.replace(table, folded=True) for table in tables]
    return [*blocks, *kept_tables(compared), *best_checkpoint_tables(records)]


def _error_sentence(rows: Sequence[Row]) -> str:
    errors = [abs(error) for row in rows if (error := peak_error(row)) is not None]
    if errors:
        over = "1 row" if len(errors) == 1 else f"{len(errors)} rows"
        return f"Largest error of the predicted peak: {100 * max(errors):.2f} % over {over}."
    return SAME_COUNT if any(row.error("peak_bytes") is not None for row in rows) else ""
