"""Views of an Analysis: one table a question, the timeline and the flame graph."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stepgauge.report.kernel_names import range_name, shortened
from stepgauge.report.numbers import cut_to, number, whole
from stepgauge.report.page import Block, Flame, Plot, Text
from stepgauge.report.profile_device import (
    collectives_table,
    copies_table,
    idle_table,
    path_table,
    streams_table,
)
from stepgauge.report.profile_ranks import overlap_table
from stepgauge.report.table import Table
from stepgauge.report.trace_timeline import trace_timeline
from stepgauge.spec.analysis import Analysis, Cell

LONGEST_NAME, LONGEST_SHAPES = 72, 48
SHOWN_KERNELS, SHOWN_OPERATIONS = 20, 16
OTHER_LIMIT = 0.02  # what no rule could place is named one by one above this share
# Above any device's memory and caches, and any device's products: such a rate is no rate.
MOST_BYTES_PER_S, MOST_FLOP_PER_S = 3e13, 3e16
ATTENTION_PARTS = ("scores", "softmax", "values")
_SPELLED = {"host": "Python, views and autograd"}
_LACKING = {"host": "the host's work", "launch and turnaround": "launch delays and turnaround"}


def blocks(found: Analysis, *, with_timeline: bool = True) -> list[Block]:
    """All of it, for the report."""
    pictures: list[Block] = []
    if with_timeline and found.timeline:
        pictures.append(
            Plot(
                trace_timeline([("", found.timeline)]), "The last profiled steps, stream by stream."
            )
        )
    pictures.append(
        Flame(found.flame, found.steps, "Where the time goes, by nesting: phases, parts of the model, operations"
              + (", kernels." if found.on_device else "."))
    )  # fmt: skip
    return [*pictures, *(Text(line) for line in sentences(found)), *tables(found)]


def tables(found: Analysis) -> list[Table]:
    """One table a question; those that the trace cannot answer are left out."""
    shown = [
        phases_table(found),
        stopwatch_table(found),
        ranges_table(found),
        kinds_table(found),
        top_table(found),
        kernels_table(found),
        attention_table(found),
        path_table(found),
        idle_table(found),
        streams_table(found),
        copies_table(found),
        operations_table(found),
        collectives_table(found),
        overlap_table([found.overlap] if found.overlap else []),
    ]
    return [table for table in shown if table.rows]


def answer(found: Analysis) -> str:
    """Why the step takes as long as it does, as far as two sentences can say it."""
    step = f"A step takes {number(found.step_us / 1e3)} ms"
    kinds = _sums(found.cells, lambda cell: cell.kind, _us)
    if not found.on_device:
        most = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
        parts = ", ".join(
            f"{number(kinds[kind] / 1e3 / found.steps)} ms in {_SPELLED.get(kind, kind)}"
            for kind in most
        )
        return f"{step} on the host: {parts}."
    idle = sum(cell.idle_us for cell in found.cells) / found.steps
    gains = sorted(found.path, key=lambda row: -row.gain_us)[:3]
    gained = ", ".join(
        f"{number(row.gain_us / 1e3 / found.steps)} ms without {_LACKING.get(row.what, row.what)}"
        for row in gains
        if row.gain_us > 0.01 * found.step_us * found.steps
    )
    return (
        f"{step}: the device works {number((found.step_us - idle) / 1e3)} ms and stands still "
        f"{number(idle / 1e3)} ms."
    ) + (f" It would be shorter by {gained}." if gained else "")


def sentences(found: Analysis) -> list[str]:
    """What a table does not say by itself."""
    result = list(found.notes)
    if found.lead_in_us > 0 or found.tail_us > 0:
        result.append(
            f"Not in the steps: {number(found.lead_in_us / 1e3)} ms from the host's begin to the device's "
            f"first work, {number(found.tail_us / 1e3)} ms from its last work to the host's end."
        )
    idle = max(found.idle, key=lambda row: row.us, default=None)
    if idle is not None:
        still = sum(row.us for row in found.idle)
        result.append(
            f"The device stood still {100 * still / found.steps / found.step_us:.1f} % of the step; most of it "
            f"{idle.reason}, in {idle.phase or 'the rest'} ({100 * idle.us / still:.0f} % of that time)."
        )
    matmul, softmax = (_attention_us(found, part) for part in (("scores", "values"), ("softmax",)))
    if matmul and softmax:
        ratio = softmax / matmul
        result.append(
            f"In attention, forward: softmax {number(softmax / found.steps)} µs a step, the two matrix products "
            f"{number(matmul / found.steps)} µs; softmax takes {number(ratio)} times as long with a small part of "
            "the FLOPs (table below)."
        )
    return result + _unplaced(found)


def _unplaced(found: Analysis) -> list[str]:
    """The names that no rule knows, where they matter."""
    whole_us = sum(cell.us for cell in found.cells)
    sums = _sums((cell for cell in found.cells if cell.kind == "other"), lambda c: c.name, _us)
    share = sum(sums.values()) / whole_us if whole_us else 0.0
    if share <= OTHER_LIMIT:
        return []
    names = sorted(sums, key=lambda name: -sums[name])
    shown = ", ".join(
        f"{shortened(name, LONGEST_NAME)} ({100 * sums[name] / whole_us:.1f} %)"
        for name in names[:8]
    )
    return [
        f"No rule placed {100 * share:.1f} % of the time ({len(names)} names); --rules FILE can: {shown}."
    ]


def _attention_us(found: Analysis, parts: Sequence[str]) -> float:
    wanted = tuple(f".{part}" for part in parts)
    return sum(c.us for c in found.cells if c.phase == "forward" and c.range.endswith(wanted))


def phases_table(found: Analysis) -> Table:
    """The stopwatch without and with the profiler, and the trace: what the profiler costs, and
    whether it is right.

    A trace that another program wrote comes without the stopwatch.
    """
    rows = []
    was_timed = bool(found.stopwatch_ms)
    for phase in [*found.phases_us, "step"]:
        mine = [cell for cell in found.cells if phase in ("step", cell.phase)]
        trace = sum(_values(found, phase)) / found.steps / 1e3
        alone, watched = found.stopwatch_ms.get(phase), _watched(found, phase, statistics.median)
        cost = 100 * (watched / alone - 1) if alone and watched else None
        busy, idle = (
            sum(getattr(cell, name) for cell in mine) / found.steps
            for name in ("busy_us", "idle_us")
        )
        timed: list[Any] = [alone, watched, cost] if was_timed else []
        device = [busy / 1e3, idle / 1e3] if found.on_device else []
        calls = whole(sum(cell.calls for cell in mine) / found.steps)
        rows.append([phase or "rest", *timed, trace, *device, calls])
    watch_head = ["stopwatch ms", "stopwatch profiled ms", "profiler costs %"] if was_timed else []
    device_head = ["busy ms", "idle ms"] if found.on_device else []
    head = ["phase", *watch_head, "trace ms", *device_head, f"{_noun(found)} a step"]
    stopwatch = (
        "stopwatch without the profiler and with it (medians), and the trace"
        if was_timed
        else "the trace"
    )
    caption = f"Phases: {stopwatch} (means of {found.steps})."
    formats = {"profiler costs %": "+.1f"}
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption, formats=formats)


def _watched(
    found: Analysis, phase: str, statistic: Callable[[Sequence[float]], float]
) -> float | None:
    """Milliseconds of the phase, or of the whole step, by the stopwatch in the profiled steps."""
    if phase != "step":
        values: Sequence[float] = found.watched_ms.get(phase, [])
    else:
        values = [sum(step) for step in zip(*found.watched_ms.values(), strict=True)]
    return statistic(values) if values else None


def _values(found: Analysis, phase: str) -> Sequence[float]:
    if phase != "step":
        return found.phases_us[phase]
    return [sum(values) for values in zip(*found.phases_us.values(), strict=True)]


def ranges_table(found: Analysis) -> Table:
    """Each part of the model in each phase, idle time before its kernels included."""
    phases = list(found.phases_us)
    sums = _sums(found.cells, lambda c: (c.range, c.phase), lambda c: c.busy_us + c.idle_us)
    names = list(dict.fromkeys(cell.range for cell in found.cells))
    totals = {name: sum(sums.get((name, phase), 0.0) for phase in phases) for name in names}
    in_all = sum(totals.values()) or 1.0

    def row(label: str, values: Sequence[float], total: float) -> list[Any]:
        return [label, *(us / 1e3 / found.steps for us in values), total / 1e3 / found.steps]

    rows = [
        [*row(range_name(name) or "outside of all", [sums.get((name, p), 0.0) for p in phases], totals[name]),
         100 * totals[name] / in_all]
        for name in sorted(names, key=lambda n: -totals[n])
    ]  # fmt: skip
    by_phase = [sum(sums.get((name, phase), 0.0) for name in names) for phase in phases]
    rows.append([*row("sum of ranges", by_phase, in_all), 100.0])
    head = ["range", *(f"{phase or 'rest'} ms" for phase in phases), "step ms", "share %"]
    idle = ", the device's idle time before its kernels included" if found.on_device else ""
    caption = f"Ranges: time a step{idle}; equal parts of repeated blocks together."
    formats = {"share %": ".1f"}
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption, formats=formats)


def stopwatch_table(found: Analysis) -> Table:
    """The phases of the trace beside the stopwatch, which counts from the host's begin: with the
    lead-in, without what lies between the steps.
    """
    if not found.stopwatch_ms and not found.watched_ms:
        return Table([], [])
    timed = [phase for phase in found.phases_us if phase]
    trace = [sum(found.phases_us[phase]) / found.steps / 1e3 for phase in timed]
    if trace:
        trace[0] += found.lead_in_us / found.steps / 1e3
    trace.append(sum(trace))
    rows: list[list[Any]] = [["trace, with its lead-in", *trace]]
    for label, watch in (
        ("stopwatch, same steps", [_watched(found, p, statistics.fmean) for p in [*timed, "step"]]),
        (
            "stopwatch, unprofiled (median)",
            [found.stopwatch_ms.get(phase) for phase in [*timed, "step"]],
        ),
    ):
        if any(watch):
            off = [100 * (t / w - 1) if w else None for t, w in zip(trace, watch, strict=True)]
            rows += [[label, *watch], [f"trace against {label}, %", *off]]
    head = ["", *(f"{phase} ms" for phase in timed), "step ms"]
    return Table(head, rows, caption="The trace's phases beside the stopwatch.", names=1)


def kinds_table(found: Analysis) -> Table:
    """Share of each kind, in a forward and in the whole step."""
    phases = [*found.phases_us, "step"]
    sums = _sums(found.cells, lambda c: (c.kind, c.phase), _us)
    for (kind, _), us in list(sums.items()):
        sums[kind, "step"] = sums.get((kind, "step"), 0.0) + us
    totals = {phase: sum(us for (_, p), us in sums.items() if p == phase) for phase in phases}
    kinds = [kind for kind in {cell.kind for cell in found.cells} if sums[kind, "step"] > 0]
    rows = []
    for kind in sorted(kinds, key=lambda kind: -sums[kind, "step"]):
        cells: list[Any] = [kind]
        for phase in phases:
            us = sums.get((kind, phase), 0.0)
            cells += [us / 1e3 / found.steps, 100 * us / totals[phase] if totals[phase] else None]
        rows.append(cells)
    head = ["kind", *(f"{phase or 'rest'} {unit}" for phase in phases for unit in ("ms", "%"))]
    noun = _noun(found)
    caption = (
        f"Kinds of work: time of the {noun} a step, and its share of all {noun} of the phase. What "
        "autograd computes by plain operators, such as backward of an eager norm, is of their kinds."
    )
    formats = {column: ".1f" for column in head if column.endswith("%")}
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption, formats=formats)


def top_table(found: Analysis) -> Table:
    """The one with most time in each phase."""
    sums = _sums(found.cells, lambda c: (c.phase, c.name), _us)
    calls = _sums(found.cells, lambda c: (c.phase, c.name), lambda c: c.calls)
    kinds = {(cell.phase, cell.name): cell.kind for cell in found.cells}
    rows = []
    for phase in found.phases_us:
        mine = {key: us for key, us in sums.items() if key[0] == phase and us > 0}
        if not mine:
            continue
        key = max(mine, key=lambda k: mine[k])
        times = [mine[key] / 1e3 / found.steps, 100 * mine[key] / sum(mine.values())]
        rows.append([phase or "rest", shortened(key[1], LONGEST_NAME), kinds[key],
                     whole(calls[key] / found.steps), *times])  # fmt: skip
    head = ["phase", _noun(found)[:-1], "kind", "calls a step", "ms a step", "share of phase %"]
    caption = f"The {_noun(found)[:-1]} with most time in each phase."
    formats = {"share of phase %": ".1f"}
    return Table(head, rows, numeric=frozenset(head[3:]), caption=caption, formats=formats)


def kernels_table(found: Analysis, shown: int = SHOWN_KERNELS) -> Table:
    """Those with most time, with their kind and the rule that placed them."""
    key = ("name", "kind", "phase", "rule")
    sums = _sums(found.cells, lambda c: tuple(getattr(c, name) for name in key), _us)
    calls = _sums(found.cells, lambda c: tuple(getattr(c, name) for name in key), lambda c: c.calls)
    in_all = sum(sums.values()) or 1.0
    rows, covered = [], 0.0
    for (name, kind, phase, rule), us in sorted(sums.items(), key=lambda item: -item[1])[:shown]:
        if us <= 0:
            break
        covered += us
        number_of = calls[name, kind, phase, rule]
        mean = us / number_of if number_of else None
        figures = [whole(number_of / found.steps), us / 1e3 / found.steps, mean, 100 * us / in_all]
        rows.append([shortened(name, LONGEST_NAME), kind, phase or "rest", *figures, rule])
    head = [
        _noun(found)[:-1],
        "kind",
        "phase",
        "calls a step",
        "ms a step",
        "mean µs",
        "share %",
        "rule",
    ]
    caption = f"{_noun(found).capitalize()} with most time, {len(rows)} of {len(sums)}: {100 * covered / in_all:.0f} %."
    formats = {"share %": ".1f"}
    return Table(
        head, rows, numeric=frozenset(head[3:7]), caption=caption, names=3, formats=formats
    )


def attention_table(found: Analysis) -> Table:
    """Inside attention: scores, softmax and value product, time against FLOPs."""
    rows = []
    for part in ATTENTION_PARTS:
        for phase in found.phases_us:
            mine = [c for c in found.cells if c.range.endswith(f".{part}") and c.phase == phase]
            us, flops, bytes_ = (
                sum(getattr(c, n) for c in mine) / found.steps for n in ("us", "flops", "bytes")
            )
            if us:
                rates = [flops / us / 1e6 or None, bytes_ / us / 1e3 or None]
                rows.append([part, phase, us, flops / 1e9 or None, *rates])
    head = ["part of attention", "phase", "µs a step", "GFLOP a step", "TFLOP/s", "GB/s"]
    caption = "Softmax against the matrix products of attention."
    return Table(head, rows, numeric=frozenset(head[2:]), caption=caption)


def operations_table(found: Analysis, shown: int = SHOWN_OPERATIONS) -> Table:
    """What matrix products and memory-bound operations reach, against the roofline of this device."""
    roof = found.ceilings
    rows = []
    for row in found.operations[:shown]:
        seconds = row.us / row.calls / 1e6 if row.calls else 0.0
        share = None
        if roof and seconds:
            # The roofline: an operation takes at least as long as its FLOPs, and at least as long
            # as its bytes.
            least = max(row.flops / roof.flop_per_s, row.bytes / roof.bytes_per_s)
            share = round(100 * least / seconds)
        flop_per_s, bytes_per_s = (
            value / seconds if seconds and value / seconds < most else 0.0
            for value, most in ((row.flops, MOST_FLOP_PER_S), (row.bytes, MOST_BYTES_PER_S))
        )
        rows.append([
            row.operation, row.kind, cut_to(row.shapes, LONGEST_SHAPES), row.dtype.removeprefix("c10::"),
            whole(row.calls / found.steps), row.us / 1e3 / found.steps, seconds * 1e6, flop_per_s / 1e12 or None,
            bytes_per_s / 1e9 or None, row.flops / row.bytes or None, share,
        ])  # fmt: skip
    head = ["operation", "kind", "shapes", "type", "calls a step", "ms a step", "mean µs", "TFLOP/s", "GB/s",
            "FLOP/byte", "of roofline %"]  # fmt: skip
    limits = (
        f" Measured ceilings: {number(roof.flop_per_s / 1e12)} TFLOP/s, {number(roof.bytes_per_s / 1e9)} GB/s "
        f"({roof.condition})."
        if roof
        else ""
    )
    caption = f"Operations with shapes against the roofline, those with most time; bytes are the least.{limits}"
    return Table(head, rows, numeric=frozenset(head[4:]), caption=caption, names=4)


def _sums(
    cells: Iterable[Cell], key: Callable[[Cell], object], value: Callable[[Cell], float]
) -> dict[Any, float]:
    result: dict[Any, float] = defaultdict(float)
    for cell in cells:
        result[key(cell)] += value(cell)
    return result


def _noun(found: Analysis) -> str:
    return "kernels" if found.on_device else "operations"


def _us(cell: Cell) -> float:
    return cell.us
