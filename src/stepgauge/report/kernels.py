"""Records of operations beside their peers as a table and as plots."""

from collections.abc import Sequence

from stepgauge.report.names import flatten, varying
from stepgauge.report.numbers import scaled
from stepgauge.report.table import Table
from stepgauge.report.views import record_table, remark
from stepgauge.spec.kernel import KERNELS, OURS
from stepgauge.spec.record import Record

RATES = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
ALONE = ("peers", "seconds", "seed")  # how, not what: no column of their own


def implementations(records: Sequence[Record]) -> list[str]:
    """Those that any of the records has a time or a reason for, ours first."""
    names = [name for record in records for name in record.environment.get("outcomes", {})]
    return sorted(dict.fromkeys(names), key=lambda name: (name != OURS, names.index(name)))


def kernel_table(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """One row a record: ms of each implementation, ours against the best peer and against the
    ceiling.

    Times are medians; where statistics are asked for, the general table. Who has no time in any row
    has no column.
    """
    shape = KERNELS[records[0].kind].shape if records[0].kind in KERNELS else ()
    if statistics:
        return record_table(records, statistics=statistics, first=(*shape, "dtype"))
    shown = [
        name
        for name in implementations(records)
        if any(f"{name}_ms" in record.metrics for record in records)
    ]
    differs = [name for name in varying(records) if name not in (*ALONE, *shape, "passes", "dtype")]
    fields = [*shape, *differs, "dtype", "passes"]
    rate = next(
        (f"_{name}" for name in RATES for record in records if f"{OURS}_{name}" in record.metrics),
        "",
    )
    shown = sorted(shown, key=lambda name: name != OURS)
    head = [*fields, *(f"{name} ms" for name in shown)]
    head[len(fields) + 1 : len(fields) + 1] = ["over best peer", "of ceiling"]
    head += [f"{OURS} {RATES[rate[1:]]}"] if rate else []
    head += ["extra GiB"]
    notes = any(map(remark, records))
    rows = []
    for record in records:
        spec = flatten(record.spec)
        cells = [spec.get(name) for name in fields]
        times = [_time(record, name) for name in shown]
        ratios = [record.median(name) for name in ("ratio_to_best_peer", "fraction_of_ceiling")]
        cells += [*times[:1], *ratios, *times[1:]]
        cells += [record.median(f"{OURS}{rate}")] if rate else []
        cells += [scaled(record.median(f"{OURS}_extra_bytes"), "bytes")]
        rows.append(cells + ([remark(record)] if notes else []))
    numeric = frozenset(head[len(fields) :])
    caption = "Medians. Over best peer: its time divided by ours, above 1 where ours is faster."
    return Table(
        head + (["remark"] if notes else []),
        rows,
        numeric=numeric,
        caption=caption,
        formats=dict.fromkeys(("over best peer", "of ceiling"), ".3f"),
    )


def _time(record: Record, name: str) -> float | str | None:
    """Its median, or the word for why it has none."""
    if f"{name}_ms" in record.metrics:
        return record.median(f"{name}_ms")
    return str(record.environment.get("outcomes", {}).get(name, "")).partition(":")[0]


def launchers_of(records: Sequence[Record]) -> list[str]:
    """One sentence an operation that did not run in C++ throughout though it has a path there, with
    the reason.
    """
    paths = [path for record in records for path in record.environment.get("native", {}).items()]
    return [f"{name} ran in {path}" for name, path in dict.fromkeys(paths) if path != "C++"]


def outcomes_of(records: Sequence[Record]) -> list[str]:
    """One sentence an implementation that is absent, with the reason."""
    return [
        f"without {name}: {reason.removeprefix('absent: ')}"
        for name, reason in dict.fromkeys(
            (name, outcome)
            for record in records
            for name, outcome in record.environment.get("outcomes", {}).items()
            if outcome.startswith("absent: ")
        )
    ]
