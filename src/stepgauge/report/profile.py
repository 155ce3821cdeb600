"""Views of an Analysis: E2's questions, one table each, the timeline and the flame graph."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stepgauge.report.numbers import count, number
from stepgauge.report.page import Block, Flame, Plot, Text
from stepgauge.report.table import Table
from stepgauge.report.timeline import timeline
from stepgauge.spec.analysis import KINDS, Analysis, Cell, Overlap

LONGEST_NAME = 72
SHOWN_KERNELS, SHOWN_OPERATIONS = 20, 16
OTHER_LIMIT = 0.02  # what no rule could place is named one by one above this share
ATTENTION_PARTS = ("scores", "softmax", "values")


def blocks(found: Analysis) -> list[Block]:
    """All of it, for the report."""
    pictures: list[Block] = [
        Plot(timeline(found.lanes, found.marks, order=KINDS), "The last profiled step, by kind of work."),
        Flame(found.flame, found.steps, "Where the time goes, by nesting: phases, parts of the model, operations"
              + (", kernels." if found.on_device else ".")),
    ]  # fmt: skip
    return [*pictures, *(Text(line) for line in sentences(found)), *tables(found)]


def tables(found: Analysis) -> list[Table]:
    """One table a question; those that the trace cannot answer are left out."""
    shown = [
        phases_table(found),
        ranges_table(found),
        kinds_table(found),
        top_table(found),
        kernels_table(found),
        attention_table(found),
        idle_table(found),
        operations_table(found),
        overlap_table([found.overlap] if found.overlap else []),
    ]
    return [table for table in shown if table.rows]


def sentences(found: Analysis) -> list[str]:
    """What a table does not say by itself."""
    result = [
        f"{kind.capitalize()}: {forward} % of the {_noun(found)}' time in a forward, {step} % in the whole step."
        for kind, forward, step in kinds_shares(found)[:1]
        if forward and step
    ]
    idle = max(found.idle, key=lambda row: row.us, default=None)
    if idle is not None:
        still = sum(row.us for row in found.idle)
        step_us = sum(map(sum, found.phases_us.values()))
        result.append(
            f"The device stood still {100 * still / step_us:.1f} % of the step; most of it {idle.reason}, "
            f"in {idle.phase or 'the rest'} ({100 * idle.us / still:.0f} % of that time)."
        )
    matmul, softmax = (_attention_us(found, part) for part in (("scores", "values"), ("softmax",)))
    if matmul and softmax:
        ratio = softmax / matmul
        result.append(
            f"In attention, forward: softmax {number(softmax / found.steps)} µs a step, the two matrix products "
            f"{number(matmul / found.steps)} µs; softmax takes {number(ratio)} times as long with a small part of "
            "the FLOPs (table below)."
        )
    whole = sum(cell.us for cell in found.cells)
    other = [cell for cell in found.cells if cell.kind == "other"]
    share = sum(cell.us for cell in other) / whole
    if share > OTHER_LIMIT:
        names = sorted(
            {cell.name for cell in other}, key=lambda n: -sum(c.us for c in other if c.name == n)
        )
        shown = ", ".join(_cut(name) for name in names[:8])
        result.append(
            f"No rule placed {100 * share:.1f} % of the time ({len(names)} names): {shown}."
        )
    return result


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
        alone, watched = found.stopwatch_ms.get(phase), _watched(found, phase)
        cost = f"{100 * (watched / alone - 1):+.1f}" if alone and watched else ""
        busy, idle = (
            sum(getattr(cell, name) for cell in mine) / found.steps
            for name in ("busy_us", "idle_us")
        )
        timed = [number(alone), number(watched), cost] if was_timed else []
        device = [number(busy / 1e3), number(idle / 1e3)] if found.on_device else []
        calls = count(sum(cell.calls for cell in mine) / found.steps)
        rows.append([phase or "rest", *timed, number(trace), *device, calls])
    timed = ["stopwatch ms", "stopwatch profiled ms", "profiler costs %"] if was_timed else []
    device = ["busy ms", "idle ms"] if found.on_device else []
    head = ["phase", *timed, "trace ms", *device, f"{_noun(found)} a step"]
    stopwatch = (
        "stopwatch without the profiler (median) and with it, and the trace"
        if was_timed
        else "the trace"
    )
    caption = f"Phases: {stopwatch} (means of {found.steps})."
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption)


def _watched(found: Analysis, phase: str) -> float | None:
    """Mean milliseconds of the phase, or of the whole step, by the stopwatch in the profiled steps."""
    wanted = (
        list(found.watched_ms)
        if phase == "step"
        else [name for name in found.watched_ms if name == phase]
    )
    return sum(sum(found.watched_ms[name]) for name in wanted) / found.steps if wanted else None


def _values(found: Analysis, phase: str) -> Sequence[float]:
    if phase != "step":
        return found.phases_us[phase]
    return [sum(values) for values in zip(*found.phases_us.values(), strict=True)]


def ranges_table(found: Analysis) -> Table:
    """Each part of the model in each phase, idle time before its kernels included; their sum beside
    the stopwatch.
    """
    phases = list(found.phases_us)
    sums = _sums(found.cells, lambda c: (c.range, c.phase), lambda c: c.busy_us + c.idle_us)
    names = list(dict.fromkeys(cell.range for cell in found.cells))
    totals = {name: sum(sums.get((name, phase), 0.0) for phase in phases) for name in names}
    whole = sum(totals.values())

    def row(label: str, values: Sequence[float], total: float) -> list[str]:
        return [
            label,
            *(number(us / 1e3 / found.steps) for us in values),
            number(total / 1e3 / found.steps),
        ]

    rows = [
        [*row(name or "outside of all", [sums.get((name, p), 0.0) for p in phases], totals[name]),
         f"{100 * totals[name] / whole:.1f}"]
        for name in sorted(names, key=lambda n: -totals[n])
    ]  # fmt: skip
    by_phase = [sum(sums.get((name, phase), 0.0) for name in names) for phase in phases]
    rows.append([*row("sum of ranges", by_phase, whole), "100.0"])
    for label, watch in (
        ("stopwatch, same steps", [_watched(found, phase) for phase in [*phases, "step"]]),
        ("stopwatch, unprofiled", [found.stopwatch_ms.get(phase) for phase in [*phases, "step"]]),
    ):
        if any(watch):
            sums_ms = [us / 1e3 / found.steps for us in [*by_phase, whole]]
            differences = [
                f"{100 * (s / w - 1):+.1f} %" if w else ""
                for s, w in zip(sums_ms, watch, strict=True)
            ]
            rows += [
                [label, *map(number, watch), ""],
                [f"sum of ranges against {label}", *differences, ""],
            ]
    head = ["range", *(f"{phase or 'rest'} ms" for phase in phases), "step ms", "share %"]
    idle = ", the device's idle time before its kernels included" if found.on_device else ""
    caption = f"Ranges: time a step{idle}; equal parts of repeated blocks together."
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption)


def kinds_table(found: Analysis) -> Table:
    """Share of each kind, in a forward and in the whole step."""
    phases = list(found.phases_us)
    sums = _sums(found.cells, lambda c: (c.kind, c.phase), lambda c: c.us)
    totals = {phase: sum(us for (_, p), us in sums.items() if p == phase) for phase in phases}
    kinds = dict.fromkeys(cell.kind for cell in sorted(found.cells, key=lambda cell: -cell.us))
    whole = {kind: sum(sums.get((kind, phase), 0.0) for phase in phases) for kind in kinds}
    rows = []
    for kind in sorted(kinds, key=lambda kind: -whole[kind]):
        cells = [kind]
        for phase in phases:
            us = sums.get((kind, phase), 0.0)
            cells += [
                number(us / 1e3 / found.steps),
                f"{100 * us / totals[phase]:.1f}" if totals[phase] else "",
            ]
        rows.append(
            [
                *cells,
                number(whole[kind] / 1e3 / found.steps),
                f"{100 * whole[kind] / sum(whole.values()):.1f}",
            ]
        )
    head = [
        "kind",
        *(f"{phase or 'rest'} {unit}" for phase in [*phases, "step"] for unit in ("ms", "%")),
    ]
    caption = f"Kinds of work: time of the {_noun(found)} a step, and its share of all {_noun(found)} of the phase."
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption)


def kinds_shares(found: Analysis) -> list[list[str]]:
    """[figure, % of a forward, % of the whole step] of matmul, softmax and norm, and of all norm
    layers by range.
    """
    chosen: dict[str, Callable[[Cell], bool]] = {
        "matmul": lambda cell: cell.kind == "matmul",
        "attention, fused": lambda cell: cell.kind == "attention",
        "softmax": lambda cell: cell.kind == "softmax",
        "norm layers, by range": lambda cell: "norm" in cell.range,
        "optimizer": lambda cell: cell.kind == "optimizer",
    }
    forward = [cell for cell in found.cells if cell.phase == "forward"]

    def share(cells: Sequence[Cell], wanted: Callable[[Cell], bool]) -> str:
        whole = sum(cell.us for cell in cells)
        return (
            f"{100 * sum(cell.us for cell in cells if wanted(cell)) / whole:.1f}" if whole else ""
        )

    return [
        [name, share(forward, wanted), share(found.cells, wanted)]
        for name, wanted in chosen.items()
    ]


def top_table(found: Analysis) -> Table:
    """The one with most time in each phase."""
    sums = _sums(found.cells, lambda c: (c.phase, c.name), lambda c: c.us)
    calls = _sums(found.cells, lambda c: (c.phase, c.name), lambda c: c.calls)
    kinds = {(cell.phase, cell.name): cell.kind for cell in found.cells}
    rows = []
    for phase in found.phases_us:
        mine = {key: us for key, us in sums.items() if key[0] == phase}
        key = max(mine, key=lambda k: mine[k])
        share = f"{100 * mine[key] / sum(mine.values()):.1f}"
        times = [count(calls[key] / found.steps), number(mine[key] / 1e3 / found.steps), share]
        rows.append([phase or "rest", _cut(key[1]), kinds[key], *times])
    head = ["phase", _noun(found)[:-1], "kind", "calls a step", "ms a step", "share of phase %"]
    caption = f"The {_noun(found)[:-1]} with most time in each phase."
    return Table(head, rows, numeric=frozenset(head[3:]), caption=caption)


def kernels_table(found: Analysis, shown: int = SHOWN_KERNELS) -> Table:
    """Those with most time, with their kind and the rule that placed them."""
    sums: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cell in found.cells:
        entry = sums[cell.name, cell.kind, cell.rule, cell.phase]
        entry[0] += cell.calls
        entry[1] += cell.us
    whole = sum(us for _, us in sums.values())
    rows, covered = [], 0.0
    for (name, kind, rule, phase), (calls, us) in sorted(
        sums.items(), key=lambda item: -item[1][1]
    )[:shown]:
        covered += us
        figures = [
            number(calls / found.steps),
            number(us / 1e3 / found.steps),
            number(us / calls if calls else None),
        ]
        rows.append([_cut(name), kind, phase or "rest", *figures, f"{100 * us / whole:.1f}", rule])
    head = [
        _noun(found)[:-1],
        "kind",
        "phase",
        "calls a step",
        "ms a step",
        "mean µs",
        "share %",
        "placed because",
    ]
    caption = f"{_noun(found).capitalize()} with most time, {len(rows)} of {len(sums)}: {100 * covered / whole:.0f} %."
    return Table(head, rows, numeric=frozenset(head[3:7]), caption=caption)


def attention_table(found: Analysis) -> Table:
    """Inside attention: scores, softmax and value product, time against FLOPs."""
    rows = []
    for part in ATTENTION_PARTS:
        for phase in found.phases_us:
            mine = [c for c in found.cells if c.range.endswith(f".{part}") and c.phase == phase]
            if mine:
                us, flops, bytes_ = (
                    sum(getattr(c, n) for c in mine) / found.steps for n in ("us", "flops", "bytes")
                )
                rates = [
                    number(flops / us / 1e6 if flops else None),
                    number(bytes_ / us / 1e3 if bytes_ else None),
                ]
                rows.append(
                    [part, phase, number(us), number(flops / 1e9 if flops else None), *rates]
                )
    head = ["part of attention", "phase", "µs a step", "GFLOP a step", "TFLOP/s", "GB/s"]
    caption = "Softmax against the matrix products of attention."
    return Table(head, rows, numeric=frozenset(head[2:]), caption=caption)


def idle_table(found: Analysis) -> Table:
    """Times in which the device stood still, and why."""
    rows = [
        [row.reason, row.phase or "rest", number(row.gaps / found.steps), number(row.us / 1e3 / found.steps),
         number(row.us / row.gaps)]
        for row in sorted(found.idle, key=lambda row: -row.us)
    ]  # fmt: skip
    head = ["why the device stood still", "phase", "gaps a step", "ms a step", "mean µs"]
    return Table(
        head, rows, numeric=frozenset(head[2:]), caption="Idle time of the device, by cause."
    )


def operations_table(found: Analysis, shown: int = SHOWN_OPERATIONS) -> Table:
    """What matrix products and memory-bound operations reach, against the roofline of this device."""
    roof = found.ceilings
    rows = []
    for row in found.operations[:shown]:
        seconds = row.us / row.calls / 1e6 if row.calls else 0.0
        intensity = row.flops / row.bytes
        share = ""
        if roof and seconds:
            # The roofline: an operation takes at least as long as its FLOPs, and at least as long
            # as its bytes.
            least = max(row.flops / roof.flop_per_s, row.bytes / roof.bytes_per_s)
            share = f"{100 * least / seconds:.0f}"
        rates = [
            row.flops / seconds / 1e12 if row.flops and seconds else None,
            row.bytes / (seconds or 1.0) / 1e9,
        ]
        cells = [row.operation, row.kind, _cut(row.shapes, 48), row.dtype.removeprefix("c10::")]
        times = [
            number(row.calls / found.steps),
            number(row.us / 1e3 / found.steps),
            number(seconds * 1e6),
        ]
        rows.append(
            [*cells, *times, *map(number, rates), number(intensity if row.flops else None), share]
        )
    head = ["operation", "kind", "shapes", "type", "calls a step", "ms a step", "mean µs", "TFLOP/s", "GB/s",
            "FLOP/byte", "of roofline %"]  # fmt: skip
    limits = (
        f" Measured ceilings: {number(roof.flop_per_s / 1e12)} TFLOP/s, {number(roof.bytes_per_s / 1e9)} GB/s "
        f"({roof.condition})."
        if roof
        else ""
    )
    caption = f"Operations with shapes against the roofline, those with most time; bytes are the least.{limits}"
    return Table(head, rows, numeric=frozenset(head[4:]), caption=caption)


def overlap_table(found: Iterable[Overlap]) -> Table:
    """Communication hidden behind computing, a row a rank."""
    rows = [
        ["" if o.rank is None else str(o.rank), *map(number, (o.communication_us, o.computation_us, o.hidden_us)),
         number(o.exposed_us), f"{o.ratio:.4f}"]
        for o in found
    ]  # fmt: skip
    head = ["rank", "communication µs", "computation µs", "hidden µs", "exposed µs", "overlap"]
    caption = (
        "Overlap: time in which a rank both communicates and computes, over its time communicating."
    )
    return Table(head, rows, numeric=frozenset(head), caption=caption, names=1)


def ranks_table(found: Iterable[Analysis]) -> Table:
    """One line a rank: its step, how long its device worked and stood still, and what communication
    cost it.
    """
    rows = []
    for place, one in enumerate(found):
        step, busy, idle = (
            us / one.steps / 1e3
            for us in (
                sum(map(sum, one.phases_us.values())),
                sum(cell.busy_us for cell in one.cells),
                sum(cell.idle_us for cell in one.cells),
            )
        )
        o = one.overlap
        device = [number(busy), number(idle)] if one.on_device else ["", ""]
        shared = (
            [
                number(o.communication_us / one.steps / 1e3),
                f"{o.ratio:.4f}",
                number(o.exposed_us / one.steps / 1e3),
            ]
            if o
            else ["", "", ""]
        )
        rows.append([str(place if one.rank is None else one.rank), number(step), *device, *shared])
    head = ["rank", "step ms", "busy ms", "idle ms", "communication ms", "overlap", "exposed ms"]
    caption = "Ranks: means of a step; exposed is communication that no computing hides."
    return Table(head, rows, numeric=frozenset(head), caption=caption, names=1)


def _sums(
    cells: Iterable[Cell], key: Callable[[Cell], object], value: Callable[[Cell], float]
) -> dict[Any, float]:
    result: dict[Any, float] = defaultdict(float)
    for cell in cells:
        result[key(cell)] += value(cell)
    return result


def _noun(found: Analysis) -> str:
    return "kernels" if found.on_device else "operations"


def _cut(name: str, longest: int = LONGEST_NAME) -> str:
    """A name of C++ without its middle."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
