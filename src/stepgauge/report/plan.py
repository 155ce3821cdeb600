"""Planned layouts as tables and sentences."""

from collections.abc import Mapping, Sequence

from stepgauge.report.table import Table
from stepgauge.spec.record import Record

SETTINGS = ("micro batch", "accumulation", "checkpointing")
COLUMNS = ("#", "layout", *SETTINGS, "step ms", "± %", "MFU", "tokens/s",
           "data exposed ms", "tensor exposed ms", "bubble %", "peak GiB")  # fmt: skip
RUN = ("days", "GPU-hours")
GIB = 2**30


def plan_table(rows: Sequence[Record], caption: str) -> Table:
    """A row a layout, the fastest first. A setting that all rows share stands in the caption."""
    has_run = any("days" in row.metrics for row in rows)
    columns = [*COLUMNS, *(RUN if has_run else ())]
    shown = [
        [place, *_figures(row), *(_run(row) if has_run else ())]
        for place, row in enumerate(rows, start=1)
    ]
    alike = _alike(columns, shown)
    return Table(
        columns,
        shown,
        names=2,
        caption=", ".join([caption, *(f"{name} {value}" for name, value in alike.items())]),
        hidden=frozenset(alike) | {columns[n] for n in range(len(columns)) if _empty(shown, n)},
        formats={"MFU": ".3f", "± %": ".0f"},
    )


def _empty(rows: Sequence[Sequence[object]], place: int) -> bool:
    return all(row[place] is None for row in rows)


def _alike(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, object]:
    """The settings that all rows share."""
    values = {name: [row[columns.index(name)] for row in rows] for name in SETTINGS}
    return {
        name: each[0]
        for name, each in values.items()
        if len(rows) > 1 and len(set(each)) == 1 and each[0] is not None
    }


def _figures(row: Record) -> list[object]:
    is_user = row.spec["model"].get("network") == "user"  # which decides these itself
    bubble, spread = row.median("bubble"), row.median("spread")
    return [
        row.spec["layout"],
        None if is_user else _micro_batch(row),
        row.spec["accumulation"],
        None if is_user else row.spec["checkpointing"],
        row.median("step_ms"),
        None if spread is None else 100 * spread,
        row.median("mfu"),
        row.median("tokens_per_s"),
        row.median("data_exposed_ms"),
        row.median("tensor_exposed_ms"),
        None if bubble is None else 100 * bubble,
        row.metrics["peak_bytes"].median / GIB if "peak_bytes" in row.metrics else None,
    ]


def _micro_batch(row: Record) -> int:
    """Sequences that a rank computes together."""
    words = str(row.spec["layout"]).split()
    data = next((int(w[2:]) for w in words if w.startswith("dp") and w[2:].isdigit()), 1)
    parts = next((int(w[1:]) for w in words if w[0] == "m" and w[1:].isdigit()), 1)
    return int(row.spec["batch"]) // data // parts


def _run(row: Record) -> list[object]:
    return [row.median("days"), row.median("gpu_hours")]


def parts_table(rows: Sequence[Record]) -> Table:
    """The peak of each layout by part, in GiB, with what lies outside of torch's count."""
    parts: list[Mapping[str, float]] = [
        {str(name): float(nbytes) for name, nbytes, _ in row.tables.get("memory", [])[1:]}
        for row in rows
    ]
    names = list(dict.fromkeys(name for each in parts for name in each))
    shown = [
        [place, row.spec["layout"], *(each[name] / GIB if name in each else None for name in names)]
        for place, (row, each) in enumerate(zip(rows, parts, strict=True), start=1)
    ]
    columns = ["#", "layout", *names]
    return Table(columns, shown, names=2, caption="Memory of the fullest rank, GiB")


def magnitudes(scales: Mapping[str, float]) -> str:
    """Orders of magnitude by name, in one line."""
    return ", ".join(f"{name} {value:.1e}" for name, value in scales.items())
