"""Views of an Analysis: one table a question, and the flame graph."""

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
SHOWN_KERNELS, SHOWN_OPERATIONS = 20, 16
OTHER_LIMIT = 0.02  # what no rule could place is named one by one above this share
# Above any device's memory and caches, and any device's products: such a rate is no rate.
MOST_BYTES_PER_S, MOST_FLOP_PER_S = 3e13, 3e16
ATTENTION_PARTS = ("scores", "softmax", "values")
SPELLED = {"host": "Python, views and autograd"}


def blocks(found: Analysis) -> list[Block]:
    """All of it, for the report."""
    last = ", kernels." if found.on_device else "."
    nesting = f"Where the time goes, by nesting: phases, parts of the model, operations{last}"
    flame = Flame(found.flame, found.steps, nesting)
    return [flame, *(Text(line) for line in sentences(found)), *tables(found)]


def tables(found: Analysis) -> list[Table]:
    """One table a question; those that the trace cannot answer are left out."""
    shown = [
        phases_table(found),
        ranges_table(found),
        kinds_table(found),
        kernels_table(found),
        attention_table(found),
        idle_table(found),
        operations_table(found),
        collectives_table(found),
        overlap_table([found.overlap] if found.overlap else []),
    ]
    return [table for table in shown if table.rows]


def answer(found: Analysis) -> str:
    """Why the step takes as long as it does, as far as two sentences can say it."""
    step = f"A step takes {_ms(found.step_us)} ms"
    if not found.on_device:
        parts = ", ".join(
            f"{_ms(each.us)} ms in {SPELLED.get(kind, kind)}"
            for (kind,), each in list(sums_by(found, "kind").items())[:3]
        )
        return f"{step} on the host: {parts}."
    idle = total(found.cells, found.steps).idle_us
    return (
        f"{step}: the device works {_ms(found.step_us - idle)} ms and stands still {_ms(idle)} ms."
    )


def sentences(found: Analysis) -> list[str]:
    """What a table does not say by itself."""
    result = list(found.notes)
    if found.lead_in_us > 0 or found.tail_us > 0:
        result.append(
            f"Not in the steps: {_ms(found.lead_in_us)} ms from the host's begin to the device's "
            f"first work, {_ms(found.tail_us)} ms from its last work to the host's end."
        )
    idle = max(found.idle, key=lambda row: row.us, default=None)
    if idle is not None:
        still = sum(row.us for row in found.idle)
        result.append(
            f"The device stood still {100 * still / found.steps / found.step_us:.1f} % of the "
            f"step; most of it {idle.reason}, in {idle.phase or 'the rest'} "
            f"({100 * idle.us / still:.0f} % of that time)."
        )
    matmul, softmax = (_attention_us(found, part) for part in (("scores", "values"), ("softmax",)))
    if matmul and softmax:
        ratio = softmax / matmul
        result.append(
            f"In attention, forward: softmax {number(softmax)} µs a step, the two matrix products "
            f"{number(matmul)} µs; softmax takes {number(ratio)} times as long with a small part "
            "of the FLOPs (table below)."
        )
    return result + _unplaced(found)


def _unplaced(found: Analysis) -> list[str]:
    """The names that no rule knows, where they matter."""
    whole_us = total(found.cells, found.steps).us
    names = {name: each.us for (kind, name), each in sums_by(found, "kind", "name").items()
             if kind == "other"}  # fmt: skip
    share = sum(names.values()) / whole_us if whole_us else 0.0
    if share <= OTHER_LIMIT:
        return []
    shown = ", ".join(
        f"{short_name(name)} ({100 * us / whole_us:.1f} %)" for name, us in list(names.items())[:8]
    )
    return [f"No rule placed {100 * share:.1f} % of the time ({len(names)} names): {shown}."]


def _attention_us(found: Analysis, parts: Sequence[str]) -> float:
    """Of a forward, in a step."""
    wanted = tuple(f".{part}" for part in parts)
    cells = (c for c in found.cells if c.phase == "forward" and c.range.endswith(wanted))
    return total(cells, found.steps).us


def phases_table(found: Analysis) -> Table:
    """The stopwatch without and with the profiler, and the trace: what the profiler costs, and
    whether it is right.

    A trace that another program wrote comes without the stopwatch.
    """
    sums = {phase: each for (phase,), each in sums_by(found, "phase").items()}
    sums["step"] = total(found.cells, found.steps)
    rows = []
    for phase in [*found.phases_us, "step"]:
        alone, watched = found.stopwatch_ms.get(phase), _watched(found, phase)
        timed = {
            "stopwatch ms": alone,
            "stopwatch profiled ms": watched,
            "profiler costs %": 100 * (watched / alone - 1) if alone and watched else None,
        }
        own = sums.get(phase, Sum())
        rows.append({
            "phase": phase or "rest",
            **(timed if found.stopwatch_ms else {}),
            "trace ms": sum(_values(found, phase)) / found.steps / 1e3,
            **({"busy ms": own.busy_us / 1e3, "idle ms": own.idle_us / 1e3} if found.on_device else {}),
            f"{_noun(found)} a step": whole(own.calls),
        })  # fmt: skip
    stopwatch = "stopwatch without the profiler and with it (medians), and the trace"
    caption = (
        f"Phases: {stopwatch if found.stopwatch_ms else 'the trace'} (means of {found.steps})."
    )
    return Table.from_rows(rows, caption=caption, formats={"profiler costs %": "+.1f"})


def _watched(found: Analysis, phase: str) -> float | None:
    """Milliseconds of the phase, or of the whole step, by the stopwatch in the profiled steps."""
    if phase != "step":
        values: Sequence[float] = found.watched_ms.get(phase, [])
    else:
        values = [sum(step) for step in zip(*found.watched_ms.values(), strict=True)]
    return statistics.median(values) if values else None


def _values(found: Analysis, phase: str) -> Sequence[float]:
    if phase != "step":
        return found.phases_us[phase]
    return [sum(values) for values in zip(*found.phases_us.values(), strict=True)]


def ranges_table(found: Analysis) -> Table:
    """Each part of the model in each phase, idle time before its kernels included."""
    by_range: dict[str, dict[str, float]] = {}
    for (name, phase), each in sums_by(found, "range", "phase").items():
        by_range.setdefault(name, {})[phase] = each.busy_us + each.idle_us
    in_all = {phase: sum(row.get(phase, 0.0) for row in by_range.values())
              for phase in found.phases_us}  # fmt: skip
    whole_us = sum(in_all.values()) or 1.0

    def row(label: str, by_phase: Mapping[str, float]) -> dict[str, Any]:
        us = sum(by_phase.get(phase, 0.0) for phase in found.phases_us)
        phases = {f"{p or 'rest'} ms": by_phase.get(p, 0.0) / 1e3 for p in found.phases_us}
        return {"range": label, **phases, "step ms": us / 1e3, "share %": 100 * us / whole_us}

    rows = [row(range_name(name) or "outside of all", each) for name, each in by_range.items()]
    rows.sort(key=lambda each: -each["step ms"])
    idle = ", the device's idle time before its kernels included" if found.on_device else ""
    caption = f"Ranges: time a step{idle}; equal parts of repeated blocks together."
    rows.append(row("sum of ranges", in_all))
    return Table.from_rows(rows, caption=caption, formats={"share %": ".1f"})


def kinds_table(found: Analysis) -> Table:
    """Share of each kind, in a forward and in the whole step."""
    by_phase = {phase: each.us for (phase,), each in sums_by(found, "phase").items()}
    by_phase["step"] = sum(by_phase.values())
    parts = {key: each.us for key, each in sums_by(found, "kind", "phase").items()}
    rows = []
    for (kind,), whole_step in sums_by(found, "kind").items():
        if not whole_step.us:
            continue
        row: dict[str, Any] = {"kind": kind}
        for phase in [*found.phases_us, "step"]:
            us = whole_step.us if phase == "step" else parts.get((kind, phase), 0.0)
            in_all, name = by_phase.get(phase, 0.0), phase or "rest"
            row |= {f"{name} ms": us / 1e3, f"{name} %": 100 * us / in_all if in_all else None}
        rows.append(row)
    noun = _noun(found)
    caption = (
        f"Kinds of work: time of the {noun} a step, and its share of all {noun} of the phase. What "
        "autograd computes by plain operators, such as backward of an eager norm, is of their "
        "kinds."
    )
    formats = {f"{phase or 'rest'} %": ".1f" for phase in [*found.phases_us, "step"]}
    return Table.from_rows(rows, caption=caption, formats=formats)


def kernels_table(found: Analysis) -> Table:
    """Those with most time, with their kind and the rule that placed them."""
    sums = sums_by(found, "name", "kind", "phase", "rule")
    most = [(key, each) for key, each in list(sums.items())[:SHOWN_KERNELS] if each.us > 0]
    in_all = sum(each.us for each in sums.values()) or 1.0
    noun = _noun(found)
    rows = [
        {
            noun[:-1]: short_name(name), "kind": kind, "phase": phase or "rest",
            "calls a step": whole(each.calls), "ms a step": each.us / 1e3,
            "mean µs": each.us / each.calls if each.calls else None,
            "share %": 100 * each.us / in_all, "rule": rule,
        }
        for (name, kind, phase, rule), each in most
    ]  # fmt: skip
    covered = 100 * sum(each.us for _, each in most) / in_all
    caption = f"{noun.capitalize()} with most time, {len(rows)} of {len(sums)}: {covered:.0f} %."
    return Table.from_rows(rows, caption=caption, names=3, formats={"share %": ".1f"})


def attention_table(found: Analysis) -> Table:
    """Inside attention: scores, softmax and value product, time against FLOPs."""
    rows = []
    for part in ATTENTION_PARTS:
        for phase in found.phases_us:
            mine = (c for c in found.cells if c.range.endswith(f".{part}") and c.phase == phase)
            each = total(mine, found.steps)
            if each.us:
                rows.append({
                    "part of attention": part, "phase": phase, "µs a step": each.us,
                    "GFLOP a step": each.flops / 1e9 or None,
                    "TFLOP/s": each.flops / each.us / 1e6 or None,
                    "GB/s": each.bytes / each.us / 1e3 or None,
                })  # fmt: skip
    return Table.from_rows(rows, caption="Softmax against the matrix products of attention.")


def operations_table(found: Analysis) -> Table:
    """What matrix products and memory-bound operations reach, against the roofline of this device."""
    roof = found.ceilings
    rows = []
    for row in found.operations[:SHOWN_OPERATIONS]:
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
        rows.append({
            "operation": row.operation, "kind": row.kind, "shapes": truncated(row.shapes, LONGEST_SHAPES),
            "type": row.dtype.removeprefix("c10::"), "calls a step": whole(row.calls / found.steps),
            "ms a step": row.us / 1e3 / found.steps, "mean µs": seconds * 1e6,
            "TFLOP/s": flop_per_s / 1e12 or None, "GB/s": bytes_per_s / 1e9 or None,
            "FLOP/byte": row.flops / row.bytes or None, "of roofline %": share,
        })  # fmt: skip
    caption = (
        "Operations with shapes against the roofline, those with most time; bytes are the least."
    )
    return Table.from_rows(rows, caption=f"{caption}{_limits(roof)}" if roof else caption, names=4)


def _limits(roof: Ceilings) -> str:
    reached = f"{number(roof.flop_per_s / 1e12)} TFLOP/s, {number(roof.bytes_per_s / 1e9)} GB/s"
    told = f" Measured ceilings: {reached} ({roof.condition})."
    if roof.missed_cores <= LEAST_MISSED:
        return told
    return (
        f"{told} They are too low and the shares too high: other work had "
        f"{roof.missed_cores:.1f} of the cores meanwhile."
    )


def idle_table(found: Analysis) -> Table:
    """Times in which the device stood still, and why."""
    rows = [
        [row.reason, row.phase or "rest", row.gaps / found.steps, row.us / 1e3 / found.steps, row.us / row.gaps]
        for row in sorted(found.idle, key=lambda row: -row.us)
    ]  # fmt: skip
    head = ["why the device stood still", "phase", "gaps a step", "ms a step", "mean µs"]
    return Table(head, rows, caption="Idle time of the device, by cause.", names=2)


def collectives_table(found: Analysis) -> Table:
    """This rank's collectives; the time in each includes waiting for other ranks."""
    rows = []
    for row in found.collectives[:SHOWN_OPERATIONS]:
        calls = len(row.calls_us)
        busbw = bus_bytes_per_s(row, row.us / calls) / 1e9
        rows.append([row.name, range_name(row.range), row.dtype, row.group_size or None, row.bytes or None,
                     calls / found.steps, row.us / 1e3 / found.steps, row.us / calls, busbw or None])  # fmt: skip
    head = [
        "collective",
        "range",
        "type",
        "ranks",
        "size B",
        "calls a step",
        "ms a step",
        "mean µs",
        "busbw GB/s",
    ]
    caption = "Collectives of this rank; their times include waiting for the others, so busbw is the least."
    return Table(head, rows, caption=caption, names=5)


def _ms(us: float) -> str:
    return number(us / 1e3)


def _noun(found: Analysis) -> str:
    return "kernels" if found.on_device else "operations"
