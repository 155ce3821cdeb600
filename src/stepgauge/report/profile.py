"""Reports on the analysis of one trace: tables, sentences and the flame graph."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.kernel_names import range_name, short_name
from stepgauge.report.numbers import number, truncated, whole
from stepgauge.report.page import Block, Flame, Text
from stepgauge.report.profile_ranks import overlap_table
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis, Ceilings, Sum, sums_by, total
from stepgauge.spec.disturbance import LEAST_MISSED
from stepgauge.trace.collectives import bus_bytes_per_s

LONGEST_SHAPES = 48
MAX_KERNELS, MAX_OPERATIONS = 20, 16
MAX_OTHER = 0.02  # share of the time: above it, the kernels of kind "other" are named
# No device reaches these rates. A higher one comes from shapes that say too much, and is not shown.
MAX_BYTES_PER_S, MAX_FLOP_PER_S = 3e13, 3e16
ATTENTION_PARTS = ("scores", "softmax", "values")
KIND_LABELS = {"host": "Python, views and autograd"}


def blocks(analysis: Analysis) -> list[Block]:
    """Returns the flame graph, the sentences and the tables."""
    levels = "phases, modules, operations" + (", kernels" if analysis.on_device else "")
    flame = Flame(analysis.flame, analysis.steps, f"Time of one step by {levels}.")
    return [flame, *(Text(line) for line in sentences(analysis)), *tables(analysis)]


def tables(analysis: Analysis) -> list[Table]:
    """Returns the tables for which the trace has data."""
    shown = [
        phases_table(analysis),
        ranges_table(analysis),
        kinds_table(analysis),
        kernels_table(analysis),
        attention_table(analysis),
        idle_table(analysis),
        operations_table(analysis),
        collectives_table(analysis),
        overlap_table([analysis.overlap] if analysis.overlap else []),
    ]
    return [table for table in shown if table.rows]


def answer(analysis: Analysis) -> str:
    """Returns a sentence on where the time of the step goes."""
    step = f"A step takes {_ms(analysis.step_us)} ms"
    if not analysis.on_device:
        parts = ", ".join(
            f"{_ms(each.us)} ms in {KIND_LABELS.get(kind, kind)}"
            for (kind,), each in list(sums_by(analysis, "kind").items())[:3]
        )
        return f"{step} on the host: {parts}."
    idle = total(analysis.cells, analysis.steps).idle_us
    return f"{step}: the device is busy for {_ms(analysis.step_us - idle)} ms and idle for {_ms(idle)} ms."


def sentences(analysis: Analysis) -> list[str]:
    """Returns the trace's notes and the findings that the tables do not state."""
    result = list(analysis.notes)
    if analysis.lead_in_us > 0 or analysis.tail_us > 0:
        result.append(
            f"The steps do not include {_ms(analysis.lead_in_us)} ms from the begin of the first step "
            f"on the host to the device's first work, and {_ms(analysis.tail_us)} ms from its last "
            "work to the end on the host."
        )
    idle = max(analysis.idle, key=lambda row: row.us, default=None)
    if idle is not None:
        total_us = sum(row.us for row in analysis.idle)
        result.append(
            f"The device is idle for {100 * total_us / analysis.steps / analysis.step_us:.1f} % of the "
            f"step. The largest part of that, {100 * idle.us / total_us:.0f} %, is in "
            f"{idle.phase or 'the rest of the step'} ({idle.reason})."
        )
    matmul, softmax = (
        _attention_us(analysis, part) for part in (("scores", "values"), ("softmax",))
    )
    if matmul and softmax:
        ratio = softmax / matmul
        result.append(
            f"In attention's forward, softmax takes {number(softmax)} µs a step and the two matrix "
            f"products {number(matmul)} µs: softmax takes {number(ratio)} times as long with a small "
            "part of the FLOPs (table below)."
        )
    return result + _unclassified(analysis)


def _unclassified(analysis: Analysis) -> list[str]:
    """Returns a sentence on the kernels of kind "other" if they take more than MAX_OTHER."""
    step_us = total(analysis.cells, analysis.steps).us
    names = {name: each.us for (kind, name), each in sums_by(analysis, "kind", "name").items()
             if kind == "other"}  # fmt: skip
    share = sum(names.values()) / step_us if step_us else 0.0
    if share <= MAX_OTHER:
        return []
    shown = ", ".join(
        f"{short_name(name)} ({100 * us / step_us:.1f} %)" for name, us in list(names.items())[:8]
    )
    return [
        f"{100 * share:.1f} % of the time has no known kind of work ({len(names)} names): {shown}."
    ]


def _attention_us(analysis: Analysis, parts: Sequence[str]) -> float:
    """Returns the time of these parts of attention in the forward of one step."""
    wanted = tuple(f".{part}" for part in parts)
    cells = (c for c in analysis.cells if c.phase == "forward" and c.range.endswith(wanted))
    return total(cells, analysis.steps).us


def phases_table(analysis: Analysis) -> Table:
    """Compares the phases by stopwatch, without and with the profiler, and by the trace. A trace that
    another program wrote has no stopwatch times.
    """
    sums = {phase: each for (phase,), each in sums_by(analysis, "phase").items()}
    sums["step"] = total(analysis.cells, analysis.steps)
    rows = []
    for phase in [*analysis.phases_us, "step"]:
        plain, profiled = analysis.stopwatch_ms.get(phase), _profiled_ms(analysis, phase)
        timed = {
            "stopwatch ms": plain,
            "stopwatch profiled ms": profiled,
            "profiler overhead %": _overhead(plain, profiled),
        }
        own = sums.get(phase, Sum())
        rows.append({
            "phase": phase or "rest",
            **(timed if analysis.stopwatch_ms else {}),
            "trace ms": _trace_us(analysis, phase) / 1e3,
            **({"busy ms": own.busy_us / 1e3, "idle ms": own.idle_us / 1e3} if analysis.on_device else {}),
            f"{_noun(analysis)} a step": whole(own.calls),
        })  # fmt: skip
    stopwatch = "stopwatch without and with the profiler (medians), trace"
    caption = f"Phases: {stopwatch if analysis.stopwatch_ms else 'trace'} (mean of {analysis.steps} steps)."
    formats = {"profiler overhead %": "+.1f"}
    return Table.from_rows(rows, caption=caption, formats=formats, absent="-")


def _overhead(plain: float | None, profiled: float | None) -> float | None:
    """Returns the profiler's overhead in percent; None if the profiled run was faster, which only noise
    explains.
    """
    if not plain or not profiled or profiled < plain:
        return None
    return 100 * (profiled / plain - 1)


def _profiled_ms(analysis: Analysis, phase: str) -> float | None:
    """Returns the median stopwatch time of the phase, or of the whole step, in the profiled steps."""
    if phase != "step":
        values: Sequence[float] = analysis.watched_ms.get(phase, [])
    else:
        values = [sum(step) for step in zip(*analysis.watched_ms.values(), strict=True)]
    return statistics.median(values) if values else None


def _trace_us(analysis: Analysis, phase: str) -> float:
    if phase == "step":
        return analysis.step_us
    return sum(analysis.phases_us[phase]) / analysis.steps


def ranges_table(analysis: Analysis) -> Table:
    """Returns the time of each module in each phase, including idle time before its kernels."""
    by_range: dict[str, dict[str, float]] = {}
    for (name, phase), each in sums_by(analysis, "range", "phase").items():
        by_range.setdefault(name, {})[phase] = each.busy_us + each.idle_us
    totals = {phase: sum(row.get(phase, 0.0) for row in by_range.values())
              for phase in analysis.phases_us}  # fmt: skip
    step_us = sum(totals.values()) or 1.0

    def row(label: str, by_phase: Mapping[str, float]) -> dict[str, Any]:
        us = sum(by_phase.get(phase, 0.0) for phase in analysis.phases_us)
        phases = {f"{p or 'rest'} ms": by_phase.get(p, 0.0) / 1e3 for p in analysis.phases_us}
        return {"range": label, **phases, "step ms": us / 1e3, "share %": 100 * us / step_us}

    rows = [row(range_name(name) or "outside any range", each) for name, each in by_range.items()]
    rows.sort(key=lambda each: -each["step ms"])
    idle = ", including the device's idle time before its kernels" if analysis.on_device else ""
    caption = f"Ranges: time per step{idle}. Repeated blocks are added up."
    rows.append(row("sum of ranges", totals))
    return Table.from_rows(rows, caption=caption, formats={"share %": ".1f"})


def kinds_table(analysis: Analysis) -> Table:
    """Returns the time and share of each kind of work, by phase and in the whole step."""
    by_phase = {phase: each.us for (phase,), each in sums_by(analysis, "phase").items()}
    by_phase["step"] = sum(by_phase.values())
    parts = {key: each.us for key, each in sums_by(analysis, "kind", "phase").items()}
    rows = []
    for (kind,), whole_step in sums_by(analysis, "kind").items():
        if not whole_step.us:
            continue
        row: dict[str, Any] = {"kind": kind}
        for phase in [*analysis.phases_us, "step"]:
            us = whole_step.us if phase == "step" else parts.get((kind, phase), 0.0)
            total_us, name = by_phase.get(phase, 0.0), phase or "rest"
            row |= {f"{name} ms": us / 1e3, f"{name} %": 100 * us / total_us if total_us else None}
        rows.append(row)
    noun = _noun(analysis)
    caption = (
        f"Kinds of work: time of their {noun} a step, and share of all {noun} in the phase. If "
        "autograd computes a backward with plain operators, as for an eager norm, these count as "
        "elementwise work and reductions."
    )
    formats = {f"{phase or 'rest'} %": ".1f" for phase in [*analysis.phases_us, "step"]}
    return Table.from_rows(rows, caption=caption, formats=formats)


def kernels_table(analysis: Analysis) -> Table:
    """Returns the kernels with most time, their kind, and the rule by which they have that kind."""
    sums = sums_by(analysis, "name", "kind", "phase", "rule")
    longest = [(key, each) for key, each in list(sums.items())[:MAX_KERNELS] if each.us > 0]
    step_us = sum(each.us for each in sums.values()) or 1.0
    noun = _noun(analysis)
    rows = [
        {
            noun[:-1]: short_name(name), "kind": kind, "phase": phase or "rest",
            "calls per step": whole(each.calls), "ms per step": each.us / 1e3,
            "mean µs": each.us / each.calls if each.calls else None,
            "share %": 100 * each.us / step_us, "rule": rule,
        }
        for (name, kind, phase, rule), each in longest
    ]  # fmt: skip
    covered = 100 * sum(each.us for _, each in longest) / step_us
    caption = f"The {len(rows)} of {len(sums)} {noun} with most time: {covered:.0f} % of all {noun}' time."
    return Table.from_rows(rows, caption=caption, names=3, formats={"share %": ".1f"})


def attention_table(analysis: Analysis) -> Table:
    """Returns time and FLOPs of the parts of attention: scores, softmax and value product."""
    rows = []
    for part in ATTENTION_PARTS:
        for phase in analysis.phases_us:
            cells = (c for c in analysis.cells if c.range.endswith(f".{part}") and c.phase == phase)
            each = total(cells, analysis.steps)
            if each.us:
                rows.append({
                    "part of attention": part, "phase": phase, "µs a step": each.us,
                    "GFLOP a step": each.flops / 1e9 or None,
                    "TFLOP/s": each.flops / each.us / 1e6 or None,
                    "GB/s": each.bytes / each.us / 1e3 or None,
                })  # fmt: skip
    return Table.from_rows(rows, caption="Attention: softmax compared with the matrix products.")


def operations_table(analysis: Analysis) -> Table:
    """Returns the rates of the operations with most time, and their share of the roofline."""
    roofline = analysis.ceilings
    rows = []
    for row in analysis.operations[:MAX_OPERATIONS]:
        seconds = row.us / row.calls / 1e6 if row.calls else 0.0
        share = None
        if roofline and seconds:
            least = max(row.flops / roofline.flop_per_s, row.bytes / roofline.bytes_per_s)
            share = round(100 * least / seconds)
        flop_per_s, bytes_per_s = (
            amount / seconds if seconds and amount / seconds < limit else 0.0
            for amount, limit in ((row.flops, MAX_FLOP_PER_S), (row.bytes, MAX_BYTES_PER_S))
        )
        rows.append({
            "operation": row.operation, "kind": row.kind, "shapes": truncated(row.shapes, LONGEST_SHAPES),
            "type": row.dtype.removeprefix("c10::"), "calls per step": whole(row.calls / analysis.steps),
            "ms per step": row.us / 1e3 / analysis.steps, "mean µs": seconds * 1e6,
            "TFLOP/s": flop_per_s / 1e12 or None, "GB/s": bytes_per_s / 1e9 or None,
            "FLOP/byte": row.flops / row.bytes or None, "of roofline %": share,
        })  # fmt: skip
    caption = (
        "Operations with most time, by shape. Their bytes are the least that they can move: each "
        "argument read once, the result written once."
    )
    if roofline:
        caption += _limits(roofline)
    return Table.from_rows(rows, caption=caption, names=4)


def _limits(roofline: Ceilings) -> str:
    text = (
        f" The roofline was measured: {number(roofline.flop_per_s / 1e12)} TFLOP/s, "
        f"{number(roofline.bytes_per_s / 1e9)} GB/s ({roofline.condition})."
    )
    if roofline.missed_cores > LEAST_MISSED:
        text += (
            f" It is too low, and the shares are too high, because other work took "
            f"{roofline.missed_cores:.1f} of the cores meanwhile."
        )
    return text


def idle_table(analysis: Analysis) -> Table:
    """Returns the idle time of the device by reason and phase."""
    rows = [
        [row.reason, row.phase or "rest", row.gaps / analysis.steps, row.us / 1e3 / analysis.steps, row.us / row.gaps]
        for row in sorted(analysis.idle, key=lambda row: -row.us)
    ]  # fmt: skip
    head = ["why the device was idle", "phase", "gaps per step", "ms per step", "mean µs"]
    return Table(head, rows, caption="Idle time of the device by reason.", names=2)


def collectives_table(analysis: Analysis) -> Table:
    """Returns this rank's collectives. Their times include waiting for other ranks."""
    rows = []
    for row in analysis.collectives[:MAX_OPERATIONS]:
        calls = len(row.calls_us)
        busbw = bus_bytes_per_s(row, row.us / calls) / 1e9
        rows.append([row.name, range_name(row.range), row.dtype, row.group_size or None, row.bytes or None,
                     calls / analysis.steps, row.us / 1e3 / analysis.steps, row.us / calls, busbw or None])  # fmt: skip
    head = [
        "collective",
        "range",
        "type",
        "ranks",
        "size B",
        "calls per step",
        "ms per step",
        "mean µs",
        "busbw GB/s",
    ]
    caption = (
        "Collectives of this rank. Their times include waiting for other ranks, so the real bus "
        "bandwidth is at least as high."
    )
    return Table(head, rows, caption=caption, names=5)


def _ms(us: float) -> str:
    return number(us / 1e3)


def _noun(analysis: Analysis) -> str:
    return "kernels" if analysis.on_device else "operations"
