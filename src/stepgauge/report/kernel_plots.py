"""Time and rate of an operation, ours beside the peers: against its size, or as bars for sizes that
are no line.
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
    """Two plots a group of records that agree in `by`: ms and rate against the field `size`."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(str(record.spec[name]) for name in by), []).append(record)
    plots = []
    ends = {figure: _ends(records, figure) for figure in ("ms", *RATES)}
    for values, group in groups.items():
        of_what = ", ".join(f"{name} {value}" for name, value in zip(by, values, strict=True))
        ordered = sorted(group, key=lambda record: float(record.spec[size]))
        plots += _pair(ordered, size, of_what, ends)
    return plots


def _ends(records: Sequence[Record], figure: str) -> Ends | None:
    """The scale that all plots of a figure share: of times logarithmic, of rates from zero."""
    names = [f"{name}_{figure}" for name in implementations(records)]
    values = [value for r in records for name in names if (value := r.median(name))]
    if not values:
        return None
    return (min(values) / 1.3, max(values) * 1.3) if figure == "ms" else (0.0, max(values) * 1.1)


def _pair(
    records: Sequence[Record], size: str, of_what: str, ends: Mapping[str, Ends | None]
) -> list[Plot]:
    times = _curves(records, size, "ms")
    if not times:
        return []
    scales = {"x": short, "y": short}
    svg = lines(times, x=size, y="ms", dots=list(times), scales=scales, ends=ends["ms"])
    rates = [_rate_plot(records, size, of_what, rate, ends[rate]) for rate in RATES]
    return [Plot(svg, f"Time, {of_what}."), *filter(None, rates)]


def _rate_plot(
    records: Sequence[Record], size: str, of_what: str, rate: str, ends: Ends | None
) -> Plot | None:
    """The rate of each implementation under what the device reaches in the same process."""
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
    line = "; the dashed line is what the device reaches in the same process" if level else ""
    return Plot(svg, f"Rate, {of_what}{line}.")


def _curves(records: Sequence[Record], size: str, figure: str) -> Curves:
    """As many as a plot can show: ours, then those with the most rows."""
    found: Curves = {}
    for name in implementations(records):
        sizes, values = [], []
        for record in records:
            value = plotted(record, f"{name}_{figure}")
            if value is not None:
                sizes.append(float(record.spec[size]))
                values.append(value)
        if values:
            found[name] = (sizes, values)
    ranked = sorted(found, key=lambda name: (name != OURS, -len(found[name][0])))
    return {name: found[name] for name in ranked[: len(SERIES)]}


def kernel_bars(records: Sequence[Record]) -> list[Plot]:
    """A cluster of bars a record that has our time: multiples of it, and memory if measured."""
    timed = [record for record in records if record.median(f"{OURS}_ms")]
    ours = [record.median(f"{OURS}_ms") or 1.0 for record in timed]
    times, memory = {}, {}
    for name in timed_implementations(timed)[: len(SERIES)]:
        ms = [record.median(f"{name}_ms") for record in timed]
        nbytes = [record.median(f"{name}_extra_bytes") for record in timed]
        times[name] = [value and value / own for value, own in zip(ms, ours, strict=True)]
        memory[name] = [value and value / GIB for value in nbytes]
    drawn = {
        "Time as a multiple of ours.": (times, "times as long as ours"),
        "Peak memory beyond inputs and results; no bar: none, or no figure.": (memory, "GiB"),
    }
    rows = labels(timed)
    return [
        Plot(grouped_bars(rows, bars, unit=unit), caption)
        for caption, (bars, unit) in drawn.items()
        if any(map(any, bars.values()))
    ]
