"""Tables of planned layouts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.cost.data_axis.wrapper_host import ASSUMED, LEFT_OUT
from stepgauge.cost.planning.overlap_ratios import OverlapRatio
from stepgauge.report.numbers import SizeUnit, number, size_unit
from stepgauge.report.table import Table
from stepgauge.report.views import PREDICTED_FOR
from stepgauge.spec.layout import Layout
from stepgauge.spec.record import Record

OUTSIDE = "(outside)"
CLOSE = 0.02  # predicted steps of which either may be shorter: the error of the best predictions
SETTINGS = ("micro batch", "accumulation", "checkpointing", "compile")
_FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?= ms| times)"
)  # a time or a ratio in a note


def plan_table(rows: Sequence[Record], caption: str) -> Table:
    """Returns one row per layout. Settings that all rows share move to the caption."""
    unit = size_unit(row.median("peak_bytes") for row in rows)
    compiles = any(row.spec["compile"] != "off" for row in rows)
    shown = [
        {**_cells(place, row, unit), **({} if compiles else {"compile": None})}
        for place, row in enumerate(rows, start=1)
    ]
    columns = {name: [cells[name] for cells in shown] for name in shown[0]}
    shared = {
        name: columns[name][0]
        for name in SETTINGS
        if len(shown) > 1 and len(set(columns[name])) == 1 and columns[name][0] is not None
    }
    return Table.from_rows(
        shown,
        names=2,
        keys=("layout", *SETTINGS),
        caption=", ".join([caption, *(f"{name} {value}" for name, value in shared.items())]),
        hidden=frozenset({*shared, PREDICTED_FOR}),  # the caption says it
        formats={"± %": ".0f"},
    )


def _cells(place: int, row: Record, unit: SizeUnit) -> dict[str, Any]:
    is_user = row.spec["model"].get("network") == "user"  # the user's file decides the batch
    layout = Layout.parse(row.spec["layout"])
    return {
        "#": place,
        "layout": row.spec["layout"],
        "step ms": row.median("step_ms"),
        "± %": _percent(row.median("spread")),
        f"peak {unit.text}": unit.value(row.median("peak_bytes")),
        **({"days": row.median("days")} if "days" in row.metrics else {}),
        "MFU %": _percent(row.median("mfu")),
        "micro batch": None if is_user else row.spec["batch"] // layout.data // layout.microbatches,
        "accumulation": row.spec["accumulation"],
        "checkpointing": None if is_user else row.spec["checkpointing"],
        "compile": row.spec["compile"],
        **({"GPU-hours": row.median("gpu_hours")} if "days" in row.metrics else {}),
        "data exposed ms": row.median("data_exposed_ms"),
        "tensor exposed ms": row.median("tensor_exposed_ms"),
        "bubble %": _percent(row.median("bubble")),
        "tokens/s": row.median("tokens_per_s"),
        PREDICTED_FOR: row.environment.get("hardware"),
    }


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def close_to_first(rows: Sequence[Record]) -> str:
    """Returns a sentence about the layouts that may be as fast as the first; "" if there are none."""
    steps = [row.metrics["step_ms"].median for row in rows]
    last = sum(step <= (1 + CLOSE) * steps[0] for step in steps)
    if last == 1:
        return ""
    if last == 2:
        return f"layout 2 is predicted within {CLOSE:.0%} of the first, too close to tell which is faster"
    others = "2 and 3" if last == 3 else f"2 to {last}"
    return f"layouts {others} are predicted within {CLOSE:.0%} of the first, too close to tell which is fastest"


def training_run(rows: Sequence[Record], tokens: str) -> str:
    """Returns what all of a run's tokens take with the first layout; "" if their number is not known."""
    days, hours = rows[0].median("days"), rows[0].median("gpu_hours")
    if days is None or hours is None:
        return ""
    return f"{tokens} tokens take {number(days)} days with layout 1, {number(hours)} GPU-hours"


def joined_notes(rows: Sequence[Record]) -> list[str]:
    """Returns the sentences of the rows' notes with the numbers of the rows that have them.

    Those that differ only in a time or a ratio become one with a range; those on missing host costs
    become one that lists what all rows miss.
    """
    lists: dict[str, dict[str, None]] = {}
    shared: dict[str, list[tuple[int, str]]] = {}
    for place, row in enumerate(rows, start=1):
        for sentence in filter(None, row.note.split("; ")):
            head, _, names = sentence.partition(": ")
            if head in (ASSUMED, LEFT_OUT):
                lists.setdefault(head, {}).update(dict.fromkeys(names.split(", ")))
            else:
                shared.setdefault(_FIGURE.sub("#", sentence), []).append((place, sentence))
    missing = [f"{head}: {', '.join(names)}" for head, names in lists.items()]
    return [*missing, *(_of_rows(dict(each), len(rows)) for each in shared.values())]


def _of_rows(sentences: Mapping[int, str], count: int) -> str:
    """Returns one sentence for rows whose sentences differ at most in their figures."""
    figures = [_FIGURE.findall(sentence) for sentence in sentences.values()]
    ranges = (_range(texts) for texts in zip(*figures, strict=True))
    sentence = _FIGURE.sub(lambda _: next(ranges), next(iter(sentences.values())))
    if count == 1:
        return sentence
    if len(sentences) == count:
        return f"all rows: {sentence}"
    *others, last = map(str, sentences)
    return (
        f"rows {', '.join(others)} and {last}: {sentence}" if others else f"row {last}: {sentence}"
    )


def _range(texts: Sequence[str]) -> str:
    low, *_, high = sorted([*texts, texts[0]], key=lambda text: float(text.replace(",", "")))
    return low if low == high else f"{low} to {high}"


def parts_table(rows: Sequence[Record]) -> Table:
    """Returns the memory of each layout by part, in one unit."""
    parts = [
        {str(name): float(nbytes) for name, nbytes, _ in row.tables.get("memory", [])[1:]}
        for row in rows
    ]
    totals: dict[str, float] = {}
    for each in parts:
        for name, nbytes in each.items():
            totals[name] = totals.get(name, 0.0) + nbytes
    names = sorted(totals, key=lambda name: (name.endswith(OUTSIDE), -totals[name]))
    unit = size_unit(sum(each.values()) for each in parts)
    shown = []
    for place, (row, each) in enumerate(zip(rows, parts, strict=True), start=1):
        outside = sum(nbytes for name, nbytes in each.items() if name.endswith(OUTSIDE))
        total = sum(each.values())
        cells = [unit.value(each.get(name)) for name in names]
        sums = [unit.value(nbytes) for nbytes in (total - outside, outside, total)]
        shown.append([place, row.spec["layout"], *sums, *cells])
    columns = ["#", "layout", "peak", "outside", "total", *names]
    caption = (
        f"Memory of the fullest rank in {unit.text}: torch's peak, memory that torch does not count "
        "(outside), and both (total)"
    )
    return Table(columns, shown, names=2, caption=caption)


def overlap_sentence(overlap: OverlapRatio) -> str:
    """Returns how long an axis's communication takes next to the computation that could hide it."""
    if overlap.waits:
        verdict = "but computation waits for it"
    else:
        verdict = "and can be hidden" if overlap.hides else "too long to be hidden"
    return (
        f"{overlap.name}: communication takes {number(overlap.ratio)} times as long as computation, "
        f"{verdict}; the ratio depends on {overlap.depends_on}."
    )


def magnitudes(scales: Mapping[str, float]) -> str:
    """Returns orders of magnitude in one line. Each name says what is counted."""
    return ", ".join(f"{value:.1e} {name}" for name, value in scales.items())
