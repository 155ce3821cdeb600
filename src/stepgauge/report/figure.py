"""Plots as inline SVG. Their colours are CSS variables, so one drawing fits light and dark pages, and
their text stays text.

matplotlib draws with placeholder colours, which are then replaced by the page's CSS variables for
ink, grid and series.
"""

import contextlib
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stepgauge.report.numbers import Doubtful

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Placeholder colours. Their values do not matter, as long as nothing else is drawn with them.
INK, FAINT, GRID = "#010203", "#010204", "#010205"
MAX_BARS = 24  # rows in one plot
SERIES = ("#020301", "#020302", "#020303", "#020304", "#020305", "#020306")
_VARIABLES = {
    INK: "ink",
    FAINT: "faint",
    GRID: "grid",
    **{c: f"series-{i}" for i, c in enumerate(SERIES, 1)},
}

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.hashsalt": "stepgauge",  # equal input gives equal bytes
}

# A logarithmic axis with a larger ratio of its ends has labels only at powers of ten.
MAX_RATIO_LABELLED_BETWEEN = 3e3
DASHED = (0, (4, 3))
LATE = 0.85  # fraction of the x axis: names beyond it are written to the left of their line
# Widths in a legend: an entry's key with its gaps, and a letter on average.
LEGEND_KEY_INCHES, LETTER_INCHES = 0.6, 0.065

Series = Mapping[str, Sequence[float | None]]
Curve = tuple[Sequence[float], Sequence[float]]
Curves = Mapping[str, Curve]
Scales = Mapping[str, Callable[[float], str]]
NO_SCALES: Scales = MappingProxyType({})


@contextlib.contextmanager
def canvas(width: float, height: float) -> Iterator[tuple["Axes", list[str]]]:
    """Yields an axes to draw on. The SVG is appended to the list when the block ends."""
    # Imported here because it takes most of a second, and most commands draw nothing.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    output: list[str] = []
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=SERIES)}):
        figure = Figure(figsize=(width, height))
        yield figure.add_subplot(), output
        text = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata=metadata)
    output.append(_themed(text.getvalue()))


def _themed(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # A path's tenth of a point is finer than a screen.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    # the page decides how large it is
    svg = re.sub(
        r"<svg[^>]*>", lambda tag: re.sub(r' (width|height)="[^"]*"', "", tag[0]), svg, count=1
    )
    svg = re.sub(r"font: ([\d.]+px)[^\"';]*", r"font: \1 var(--sans)", svg)
    return svg.replace("'DejaVu Sans'", "var(--sans)")


def described(svg: str, text: str) -> str:
    """Returns the SVG with a description for screen readers."""
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(text)}"', 1)


def _in_words(labels: Sequence[str], series: Series, unit: str) -> str:
    rows = [
        f"{label}: {', '.join(f'{n} {short(v[i] or 0.0)}' for n, v in series.items() if v[i])}"
        for i, label in enumerate(labels)
    ]
    return f"{unit}. {'; '.join(rows)}."


def _curves_in_words(curves: Curves, x: str, y: str) -> str:
    texts = [
        f"{name} from {short(ys[0])} at {short(xs[0])} to {short(ys[-1])} at {short(xs[-1])}"
        for name, (xs, ys) in curves.items()
        if len(xs)
    ]
    return f"{y} against {x}: {'; '.join(texts)}."


def stacked_bars(
    labels: Sequence[str],
    parts: Series,
    *,
    totals: Sequence[float | None],
    unit: str,
    points: Series | None = None,
    scale_end: float | None = None,
) -> str:
    """Returns one horizontal bar per label, stacked from the parts, with its total at the end.

    totals     given separately, because a sum of medians is not the median of the sum; None: did not run
    points     other totals that are marked on the same rows, such as published ones
    scale_end  the end of the scale, which plots of one section share
    """
    _require_few(parts)
    with canvas(7.2, 0.9 + 0.42 * len(labels)) as (axes, output):
        rows = range(len(labels))
        start = [0.0] * len(labels)
        for name, values in parts.items():
            lengths = [value or 0.0 for value in values]
            axes.barh(rows, lengths, left=start, height=0.62, label=name)
            start = [a + b for a, b in zip(start, lengths, strict=True)]
        reach = 0.12 * (scale_end or max(start, default=0.0))
        for row, (end, total) in enumerate(zip(start, totals, strict=True)):
            near = [value for values in (points or {}).values() if (value := values[row])]
            # A mark that would cover the text moves it to the right.
            covering = [value for value in near if end <= 1.03 * value and value - end < reach]
            text = short(total) if total else "did not run"
            place, colour = (max([end, *covering]), row), INK if total else FAINT
            _annotate(axes, text, place, (4, 0), va="center", color=colour, fontsize=8.5)
        _mark(axes, points)
        _finish_rows(axes, labels, unit, scale_end)
    return described(output[0], _in_words(labels, {**parts, "total": totals}, unit))


def grouped_bars(labels: Sequence[str], groups: Series, *, unit: str) -> str:
    """Returns a cluster of horizontal bars per label, one bar per group."""
    _require_few(groups)
    height = 0.8 / max(1, len(groups))
    with canvas(7.2, 0.9 + len(labels) * (0.2 + 0.24 * len(groups))) as (axes, output):
        for index, (name, values) in enumerate(groups.items()):
            rows = [row - 0.4 + height * (index + 0.5) for row in range(len(labels))]
            bars = axes.barh(rows, [v or 0.0 for v in values], height=height * 0.9, label=name)
            texts = [short(value) if value else "" for value in values]
            axes.bar_label(bars, texts, padding=4, color=INK, fontsize=8.5)
        _finish_rows(axes, labels, unit)
    return described(output[0], _in_words(labels, groups, unit))


def lines(
    curves: Curves,
    *,
    x: str,
    y: str,
    dots: Sequence[str] = (),
    joined: bool = True,
    scales: Scales = NO_SCALES,
    level: tuple[str, float] | None = None,
    ends: tuple[float, float] | None = None,
) -> str:
    """Returns one line per curve of (x values, y values). A Doubtful point is marked with †.

    dots    names of the curves that get a marker per point
    joined  False: curves with markers have no line
    scales  the logarithmic axes, "x" or "y", with the function that writes their labels
    level   name and height of a horizontal limit
    ends    the range of the y axis, which plots of one section share
    """
    _require_few(curves)
    with canvas(7.2, 3.2) as (axes, output):
        for name, curve in curves.items():
            marker = "o" if name in dots else ""
            line = "-" if joined or not marker else ""
            axes.plot(*curve, marker=marker, linestyle=line, label=name)
            for at, value in zip(*curve, strict=True):
                if isinstance(value, Doubtful):
                    _annotate(axes, "†", (at, value), (3, 3), color=INK)
        if level:
            axes.axhline(level[1], color=FAINT, linestyle=DASHED, linewidth=1.2, label=level[0])
        axes.set(xlabel=x, ylabel=y)
        places = [value for xs, _ in curves.values() for value in xs]
        _use_integer_ticks(axes, places)
        _use_log_scales(axes, scales, places)
        if ends:
            axes.set_ylim(*ends)
        axes.margins(x=0.02)
        _legend(axes)
    return described(output[0], _curves_in_words(curves, x, y))


def areas(
    x: Sequence[float],
    layers: Series,
    *,
    unit: str,
    x_label: str,
    marks: Mapping[str, float] = MappingProxyType({}),
    level: tuple[str, float] | None = None,
    scale_end: float = 0.0,
) -> str:
    """Returns stacked areas over x, drawn as steps.

    marks      named places on the x axis
    level      name and height of a horizontal line
    scale_end  the least end of the scale, which plots of one section share
    """
    _require_few(layers)
    with canvas(7.2, 3.4) as (axes, output):
        heights = [[value or 0.0 for value in values] for values in layers.values()]
        axes.stackplot(x, heights, labels=list(layers), step="post", linewidth=0)
        top = max(map(sum, zip(*heights, strict=True)), default=1.0)
        end = max(top, scale_end, level[1] if level else 0.0) * 1.18
        for name, place in marks.items():
            axes.axvline(place, color=FAINT, linewidth=0.8)
            align, offset = ("right", -3) if place > LATE * x[-1] else ("left", 3)
            at = (place, end * 0.93)
            _annotate(axes, name, at, (offset, 0), ha=align, color=FAINT, fontsize=8.5)
        if level is not None:
            axes.axhline(level[1], color=INK, linewidth=1.0, linestyle=DASHED, label=level[0])
        axes.set(ylim=(0, end), xlabel=x_label, ylabel=unit)
        axes.margins(x=0)
        _legend(axes)
    sums = [sum(each) for each in zip(*heights, strict=True)]
    peak = sums.index(max(sums))
    parts = (f"{name} {short(own[peak])}" for name, own in zip(layers, heights, strict=True))
    text = f"{unit} over {x_label}. The peak is {short(top)}: {', '.join(parts)}."
    return described(output[0], text)


def roofline(
    points: Mapping[str, tuple[float, float]], *, bandwidth_gb_per_s: float, peak_tflop_per_s: float
) -> str:
    """Returns points of (FLOP per byte, TFLOP/s) under min(peak, bandwidth · intensity), the roofline
    of Williams et al., 2009.
    """
    ridge = peak_tflop_per_s / bandwidth_gb_per_s * 1e3
    intensities = [intensity for intensity, _ in points.values()]
    ends = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    _require_few(points)
    roof = [min(peak_tflop_per_s, bandwidth_gb_per_s * x / 1e3) for x in (ends[0], ridge, ends[1])]
    with canvas(7.2, 3.6) as (axes, output):
        for name, (intensity, rate) in points.items():
            axes.plot([intensity], [rate], "o", markersize=7, label=name)
        axes.plot([ends[0], ridge, ends[1]], roof, color=FAINT, label="measured roofline")
        axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s")
        _use_log_scales(axes, {"x": short, "y": short}, intensities)
        _legend(axes)
    texts = [f"{n}: {short(y)} TFLOP/s at {short(x)} FLOP per byte" for n, (x, y) in points.items()]
    limits = f"{short(peak_tflop_per_s)} TFLOP/s and {short(bandwidth_gb_per_s)} GB/s"
    return described(output[0], f"{'; '.join(texts)}. The roofline is {limits}.")


def _use_integer_ticks(axes: "Axes", xs: Sequence[float]) -> None:
    """If x is a count, places ticks only at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    if all(isinstance(value, int) for value in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _use_log_scales(axes: "Axes", scales: Scales, xs: Iterable[float]) -> None:
    """Makes axes logarithmic and says so in their labels. Ticks are powers of two if all x are whole
    numbers, else 1, 2 and 5 times a power of ten.
    """
    if "x" in scales:
        if all(float(value).is_integer() for value in xs):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: scales["x"](value))
            axes.xaxis.set_minor_formatter("")
        else:
            axes.set_xscale("log")
            _label_decades(axes.xaxis, scales["x"], axes.get_xlim())
        axes.set_xlabel(f"{axes.get_xlabel()} (log scale)")
    if "y" in scales:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, scales["y"], axes.get_ylim())
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")


def _label_decades(
    axis: "Axis", written: Callable[[float], str], ends: tuple[float, float]
) -> None:
    between = "25" if ends[1] < MAX_RATIO_LABELLED_BETWEEN * ends[0] else ""
    axis.set_major_formatter(lambda value, _: written(value))
    axis.set_minor_formatter(
        lambda value, _: written(value) if between and f"{value:e}"[0] in between else ""
    )


def _require_few(series: Mapping[str, Any]) -> None:
    """Raises ValueError for more series than there are colours."""
    if len(series) > len(SERIES):
        raise ValueError(f"{len(series)} series in one plot; it can show {len(SERIES)}")


def _annotate(
    axes: "Axes", text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Writes a text at an offset, in points, from a place."""
    axes.annotate(text, at, offset, textcoords="offset points", **style)


def _mark(axes: "Axes", points: Series | None) -> None:
    for (name, values), marker in zip((points or {}).items(), "D^sv", strict=False):
        marked = [(value, row) for row, value in enumerate(values) if value is not None]
        if marked:
            xs, ys = zip(*marked, strict=True)
            axes.plot(xs, ys, linestyle="none", marker=marker, markersize=6, markerfacecolor="none",
                      markeredgecolor=INK, markeredgewidth=1.3, label=name)  # fmt: skip


def _finish_rows(
    axes: "Axes", labels: Sequence[str], unit: str, scale_end: float | None = None
) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.margins(x=0.12)
    if scale_end:
        axes.set_xlim(0, 1.12 * scale_end)
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Places the legend above the axes and no wider than they are; a wider one would shrink the plot."""
    _, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        inches = LEGEND_KEY_INCHES + LETTER_INCHES * max(map(len, names))
        columns = max(1, int(axes.get_window_extent().width / axes.figure.dpi / inches))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns)


def short(value: float) -> str:
    """Returns three significant digits with thousands separators, and † for a Doubtful value."""
    mark = "†" if isinstance(value, Doubtful) else ""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}") + mark


def short_bytes(value: float) -> str:
    """Returns "512 K", "1 M", "1 G", in powers of 1024."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"
