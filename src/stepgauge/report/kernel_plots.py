"""Time and rate of an operation against its size, ours beside the peers."""

import statistics
from collections.abc import Sequence

from stepgauge.report.figure import SERIES, lines, short
from stepgauge.report.kernels import RATES, implementations
from stepgauge.report.page import Plot
from stepgauge.spec.kernel import OURS
from stepgauge.spec.record import Record

Curves = dict[str, tuple[list[float], list[float]]]


def kernel_plots(records: Sequence[Record], size: str, *, by: Sequence[str]) -> list[Plot]:
    """Two plots a group of records that agree in the fields `by`: ms and rate against the field `size`."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(str(record.spec[name]) for name in by), []).append(record)
    plots = []
    for values, group in groups.items():
        of_what = ", ".join(f"{name} {value}" for name, value in zip(by, values, strict=True))
        plots += _pair(sorted(group, key=lambda record: float(record.spec[size])), size, of_what)
    return plots


def _pair(records: Sequence[Record], size: str, of_what: str) -> list[Plot]:
    times = _curves(records, size, "ms")
    if not times:
        return []
    plots = [Plot(lines(times, x=size, y="ms", dots=list(times), scales={"x": short, "y": short}), f"Time, {of_what}.")]
    for rate, unit in RATES.items():
        if rates := _curves(records, size, rate):
            ceilings = [
                s.median for r in records for n, s in r.metrics.items() if n in (f"copy_{rate}", f"matmul_{rate}")
            ]
            level = ("copy" if rate == "gb_per_s" else "matmul", statistics.median(ceilings)) if ceilings else None
            drawn = lines(rates, x=size, y=unit, dots=list(rates), scales={"x": short}, level=level)
            plots.append(
                Plot(drawn, f"Rate, {of_what}; the dashed line is what the device reaches in the same process.")
            )
    return plots


def _curves(records: Sequence[Record], size: str, figure: str) -> Curves:
    """As many as a plot can show: ours, then those with the most rows."""
    found: Curves = {}
    for name in implementations(records):
        known = [
            (float(r.spec[size]), r.metrics[f"{name}_{figure}"].median)
            for r in records
            if f"{name}_{figure}" in r.metrics
        ]
        if known:
            found[name] = ([x for x, _ in known], [y for _, y in known])
    ranked = sorted(found, key=lambda name: (name != OURS, -len(found[name][0])))
    return {name: found[name] for name in ranked[: len(SERIES)]}
