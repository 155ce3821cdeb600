"""Collectives as nccl-tests prints them, their fits, and plots of both."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.cost.rates.link_fit import NOISE, LinkPoint, link
from stepgauge.report.figure import SERIES, lines, short, short_bytes
from stepgauge.report.numbers import whole
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Table
from stepgauge.report.views import plotted, remarked
from stepgauge.spec.comm import IN_PLACE, OPS, ROOT, CommSpec
from stepgauge.spec.links import Link
from stepgauge.spec.record import Record, Sample

ROOTED = ("broadcast", "reduce", "gather", "scatter")
FIXED = ("op", "backend", "algorithm", "ranks", "nodes", "dtype", "timing", "device")
MEGABYTE = 1 << 20
MOST_FIT_PLOTS = 4
LEAST_SIZES = 4  # of a curve; fewer are read more easily in the table


def asked(record: Record) -> CommSpec:
    return CommSpec(**record.spec)


def comm_table(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """The columns of nccl-tests and the spread: the whole operation's size, the slowest rank."""
    rows = []
    for record in records:
        spec, time = asked(record), record.metrics.get("time_ms")
        rows.append({
            "op": spec.op, "over": _over(spec), "ranks": spec.ranks, "timing": spec.timing,
            "size B": spec.bytes,
            "time µs": _us(time.median if time else None),
            "busbw GB/s": record.median("busbw_gb_per_s"),
            "algbw GB/s": record.median("algbw_gb_per_s"),
            "p10 µs": _us(time.p10 if time else None),
            "p90 µs": _us(time.p90 if time else None),
            "p99 µs": _us(record.median("p99_ms")),
            "count": spec.count // (spec.ranks if OPS[spec.op].split else 1),
            "type": spec.dtype,
            "redop": "sum" if OPS[spec.op].reduces else "none",
            "root": ROOT if spec.op in ROOTED else -1,
            "place": "in" if spec.op in IN_PLACE else "out",
            "factor": spec.factor,
            "wrong": _wrong(record),
            **remarked(record, records),
        })  # fmt: skip
    caption = (
        "busbw = algbw × factor; percentiles are of batches. As nccl-tests prints them: count is a "
        "rank's part where the operation is split, root is -1 where there is none; place: whether "
        "the result lies where the input was."
    )
    return Table.from_rows(rows, caption=caption, names=5, formats={"factor": ".4g"})


def _us(ms: float | None) -> float | None:
    return None if ms is None else ms * 1e3


def _over(spec: CommSpec) -> str:
    by = ["our ring"] if spec.algorithm == "ring" else []
    by += ["GPU tensors"] if spec.backend == "gloo" and spec.device != "cpu" else []
    nodes = f", {spec.nodes} nodes" if spec.nodes > 1 else ""
    return spec.backend + (f" ({', '.join(by)})" if by else "") + nodes


def moved_by(spec: CommSpec) -> str:
    """What moves the bytes and, where it is not the usual clock, the clock."""
    return _over(spec) if spec.timing == "pipelined" else f"{_over(spec)}, {spec.timing}"


def _wrong(record: Record) -> float | str | None:
    if record.status != "ok":
        return None
    found = record.median("wrong")
    return "not checked" if found is None else whole(found)


def links(records: Sequence[Record]) -> list[Link]:
    """A fit for each operation that was measured at three sizes or more."""
    by_operation: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.status == "ok" and asked(record).bytes:
            by_operation.setdefault(tuple(record.spec[name] for name in FIXED), []).append(record)
    return [
        _link(rows) for rows in by_operation.values() if len({asked(r).bytes for r in rows}) >= 3
    ]


def _link(records: Sequence[Record]) -> Link:
    last = records[-1]
    names = ("device", "torch", "cuda", "library", "hosts", "devices", "stepgauge", "commit")
    points = {asked(record).bytes: _point(record) for record in records}
    spec = asked(last)
    return link(
        list(points.values()),
        asked={name: last.spec[name] for name in FIXED},
        measured={"date": last.created, **{name: last.environment.get(name) for name in names}},
        how=f"medians of the slowest rank, {spec.timing} batches of up to {spec.iterations} operations for "
        f"{spec.seconds} s a size, {spec.warmup} untimed first",
    )


def _point(record: Record) -> LinkPoint:
    time: Sample = record.metrics["time_ms"]
    return LinkPoint(
        asked(record).bytes, time.median, max(NOISE, (time.p90 - time.p10) / time.median / 4)
    )


def fit_table(fitted: Sequence[Link]) -> Table:
    """One row a piece; the errors are medians of absolute relative errors."""
    rows = []
    for found in fitted:
        spec = CommSpec(**found.asked)
        errors = [found.held_out_error(0, MEGABYTE), found.held_out_error(MEGABYTE)]
        start = found.range_bytes[0]
        for index, piece in enumerate(found.pieces):
            below, above = errors if index == 0 else (None, None)
            to = piece.to_bytes or found.range_bytes[1]
            rows.append({
                "op": spec.op, "over": moved_by(spec), "ranks": spec.ranks, "from B": start, "to B": to,
                "α µs": piece.alpha_ms * 1e3, "1/β GB/s": _rate(piece.bytes_per_s),
                "held out < 1 MiB %": below and 100 * below,
                "held out ≥ 1 MiB %": above and 100 * above,
                "remark": _fit_remark(piece.alpha_ms, found.held_out if index == 0 else ()),
            })  # fmt: skip
            start = to
    caption = "time = α + β·bytes; the error is the median over sizes held out of the fit; blank: none was."
    formats = {"held out < 1 MiB %": ".2f", "held out ≥ 1 MiB %": ".2f"}
    return Table.from_rows(rows, caption=caption, names=5, formats=formats)


def _fit_remark(alpha_ms: float, held_out: Iterable[int]) -> str:
    """What a line of the fit is not. Sizes held out below a megabyte have one error, the others
    another.
    """
    said = []
    if alpha_ms <= 0:
        said.append("α is not above zero: a line through these sizes, no cost of a call")
    large = [size >= MEGABYTE for size in held_out]
    if 1 in (large.count(True), large.count(False)):
        said.append("an error is of one size alone")
    return "; ".join(said)


def _rate(bytes_per_s: float) -> float | str:
    return "flat" if bytes_per_s > 1e14 else bytes_per_s / 1e9


def _own(found: Link, records: Sequence[Record]) -> list[Record]:
    """The records that the fit is of."""
    good = [record for record in records if record.status == "ok"]
    return [r for r in good if all(r.spec[name] == value for name, value in found.asked.items())]


def comm_blocks(records: Sequence[Record]) -> list[Block]:
    """Bandwidth by size, the fits over the points, and the tables."""
    good = [record for record in records if record.status == "ok" and asked(record).bytes]
    fitted = links(good)
    shown: list[Block] = []
    widest = max((record.median("busbw_gb_per_s") or 0.0 for record in good), default=1.0)
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in good:
        spec = asked(record)
        groups.setdefault((spec.ranks, moved_by(spec)), []).append(record)
    for (ranks, how), here in groups.items():
        for part in _portions(_by_operation(here, "busbw_gb_per_s")):
            svg = lines(
                part,
                x="bytes",
                y="busbw GB/s",
                dots=list(part),
                scales={"x": short_bytes},
                ends=(0.0, 1.1 * _of_device(good, asked(here[0]).device, widest)),
            )
            shown.append(Plot(svg, f"Bus bandwidth by size over {how}, {ranks} ranks."))
    for found in fitted:
        if len(fitted) <= MOST_FIT_PLOTS or found.asked["op"] == "all_reduce":
            shown.append(_fit_plot(found, good))
    shown.append(comm_table(records))
    return [*shown, fit_table(fitted)] if fitted else shown


def _of_device(records: Sequence[Record], device: str, default: float) -> float:
    """The most bandwidth of rows on that device: plots of it share a scale."""
    rates = [r.median("busbw_gb_per_s") or 0.0 for r in records if asked(r).device == device]
    return max(rates, default=default)


Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _by_operation(records: Sequence[Record], metric: str) -> Curves:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        spec = asked(record)
        curves.setdefault(spec.op, []).append((spec.bytes, plotted(record, metric) or 0.0))
    long = {name: sorted(points) for name, points in curves.items() if len(points) >= LEAST_SIZES}
    return {name: tuple(zip(*points, strict=True)) for name, points in long.items()}  # type: ignore[misc]


def _portions(curves: Curves) -> list[Curves]:
    """As many curves a plot as an eye tells apart."""
    names = list(curves)
    return [
        {n: curves[n] for n in names[i : i + len(SERIES)]}
        for i in range(0, len(names), len(SERIES))
    ]


def _fit_plot(found: Link, records: Sequence[Record]) -> Plot:
    spec = CommSpec(**found.asked)
    own = _own(found, records)
    points = sorted((asked(r).bytes, r.metrics["time_ms"].median * 1e3) for r in own)
    fitted = [point for point in points if point[0] not in found.held_out]
    held_out = [point for point in points if point[0] in found.held_out]
    low, high = found.range_bytes
    sizes = [low * (high / low) ** (i / 200) for i in range(201)]
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "measured, fitted": ([size for size, _ in fitted], [us for _, us in fitted]),
        "α + β·bytes": (sizes, [found.time_ms(size) * 1e3 for size in sizes]),
    }
    if held_out:
        curves["measured, held out"] = (
            [size for size, _ in held_out],
            [us for _, us in held_out],
        )
    dots = ["measured, fitted", "measured, held out"]
    svg = lines(
        curves, x="bytes", y="µs", dots=dots, joined=False, scales={"x": short_bytes, "y": short}
    )
    errors = found.held_out_error(MEGABYTE)
    seen = sum(size >= MEGABYTE for size in found.held_out)
    of = "Error on the one held-out size" if seen == 1 else "Median error on held-out sizes"
    told = f" {of} from 1 MiB: {100 * errors:.2f} %." if errors is not None else ""
    return Plot(
        svg,
        f"{spec.op} over {moved_by(spec)}, {spec.ranks} ranks: the fit through the measured "
        f"sizes.{told}",
    )
