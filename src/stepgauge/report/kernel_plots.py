"""Plots of a kernel and its peers: time and rate against a size, or bars if the rows do not form a
line.
"""

import statistics
from collections.abc import Mapping, Sequence

from stepgauge.report.figure import SERIES, grouped_bars, lines, short
from stepgauge.report.kernels import RATES, implementations, timed_implementations
from stepgauge.report.names import labels
from stepgauge.report.page import Plot
from stepgauge.report.views import plotted
from stepgauge.spec.kernel import OURS
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB

Curves = dict[str, tuple[list[float], list[float]]]
Ends = tuple[float, float]


def kernel_plots(records: Sequence[Record], size: str, *, by: Sequence[str]) -> list[Plot]:
    """Returns plots of time and rate against the field `size`, for each group of records that agree in
    the fields `by`.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(str(record.spec[name]) for name in by), []).append(record)
    plots = []
    ends = {figure: _ends(records, figure) for figure in ("ms", *RATES)}
    for values, group in groups.items():
        title = ", ".join(f"{name} {value}" for name, value in zip(by, values, strict=True))
        ordered = sorted(group, key=lambda record: float(record.spec[size]))
        plots += _plots_of_group(ordered, size, title, ends)
    return plots


def _ends(records: Sequence[Record], figure: str) -> Ends | None:
    """Returns the scale that all plots of a figure share. Times are logarithmic, rates start at 0."""
    names = [f"{name}_{figure}" for name in implementations(records)]
    values = [value for r in records for name in names if (value := r.median(name))]
    if not values:
        return None
    return (min(values) / 1.3, max(values) * 1.3) if figure == "ms" else (0.0, max(values) * 1.1)


def _plots_of_group(
    records: Sequence[Record], size: str, title: str, ends: Mapping[str, Ends | None]
) -> list[Plot]:
    times = _curves(records, size, "ms")
    if not times:
        return []
    scales = {"x": short, "y": short}
    svg = lines(times, x=size, y="ms", dots=list(times), scales=scales, ends=ends["ms"])
    rates = [_rate_plot(records, size, title, rate, ends[rate]) for rate in RATES]
    return [Plot(svg, f"Time, {title}."), *filter(None, rates)]


def _rate_plot(
    records: Sequence[Record], size: str, title: str, rate: str, ends: Ends | None
) -> Plot | None:
    """Plots the rate of each implementation, and the device's rate measured in the same process."""
    rates = _curves(records, size, rate)
    if not rates:
        return None
    ceiling = "copy" if rate == "gb_per_s" else "matmul"
    reached = [value for r in records if (value := r.median(f"{ceiling}_{rate}"))]
    level = (ceiling, statistics.median(reached)) if reached else None
    if ends and level:
        ends = (0.0, max(ends[1], 1.1 * level[1]))
    svg = lines(
        rates,
        x=size,
        y=RATES[rate],
        dots=list(rates),
        scales={"x": short},
        level=level,
        ends=ends,
    )
    line = f" The dashed line is a {ceiling} on this device in the same process." if level else ""
    return Plot(svg, f"Rate, {title}.{line}")


def _curves(records: Sequence[Record], size: str, figure: str) -> Curves:
    """Returns as many curves as a plot can show: ours, then those with the most rows."""
    curves: Curves = {}
    for name in implementations(records):
        sizes, values = [], []
        for record in records:
            value = plotted(record, f"{name}_{figure}")
            if value is not None:
                sizes.append(float(record.spec[size]))
                values.append(value)
        if values:
            curves[name] = (sizes, values)
    ranked = sorted(curves, key=lambda name: (name != OURS, -len(curves[name][0])))
    return {name: curves[name] for name in ranked[: len(SERIES)]}


def kernel_bars(records: Sequence[Record]) -> list[Plot]:
    """Returns a cluster of bars per record: times as multiples of ours, and memory if measured."""
    timed = [record for record in records if record.median(f"{OURS}_ms")]
    ours = [record.median(f"{OURS}_ms") or 1.0 for record in timed]
    times, memory = {}, {}
    for name in timed_implementations(timed)[: len(SERIES)]:
        ms = [record.median(f"{name}_ms") for record in timed]
        nbytes = [record.median(f"{name}_extra_bytes") for record in timed]
        times[name] = [value and value / own for value, own in zip(ms, ours, strict=True)]
        memory[name] = [value and value / GIB for value in nbytes]
    drawn = {
        "Time as a multiple of our kernel's.": (times, "× our kernel's time"),
        "Peak memory in addition to inputs and results. No bar: none, or not measured.": (
            memory,
            "GiB",
        ),
    }
    rows = labels(timed)
    return [
        Plot(grouped_bars(rows, bars, unit=unit), caption)
        for caption, (bars, unit) in drawn.items()
        if any(map(any, bars.values()))
    ]
