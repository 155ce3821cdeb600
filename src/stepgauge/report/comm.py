"""Reports on collectives: a table with the fields of nccl-tests, fits of time by size, plots."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.cost.rates.link_fit import NOISE, LinkPoint, link
from stepgauge.report.figure import SERIES, lines, short, short_bytes
from stepgauge.report.numbers import whole
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Table
from stepgauge.report.views import plotted, remark_cell
from stepgauge.spec.comm import COPY_ALGORITHMS, IN_PLACE, OPS, ROOT, CommSpec
from stepgauge.spec.links import Link
from stepgauge.spec.record import Record, Sample

ROOTED = ("broadcast", "reduce", "gather", "scatter")
FIXED = ("op", "backend", "algorithm", "ranks", "nodes", "dtype", "timing", "device")
SETTINGS = ("type", "timing")  # columns that are usually the same in all rows
MEGABYTE = 1 << 20
MAX_FIT_PLOTS = 4  # if there are more fits, only those of all-reduce are drawn
MIN_SIZES = 4  # a curve of fewer sizes is easier to read in the table


def comm_spec(record: Record) -> CommSpec:
    return CommSpec(**record.spec)


def comm_table(records: Sequence[Record]) -> Table:
    """Returns the fields of nccl-tests, in another order, and percentiles: what was timed, size, time,
    bandwidth, correctness, the rest. Sizes are of the whole operation, times of the slowest rank. The
    caption has the values of SETTINGS that all rows share.
    """
    rows = []
    for record in records:
        spec, time = comm_spec(record), record.metrics.get("time_ms")
        rows.append({
            "op": spec.op, "over": _backend(spec), "ranks": spec.ranks, "type": spec.dtype,
            "timing": spec.timing, "size B": spec.bytes,
            "time µs": _us(time.median if time else None),
            "busbw GB/s": record.median("busbw_gb_per_s"),
            "algbw GB/s": record.median("algbw_gb_per_s"),
            "wrong": _wrong(record),
            "p10 µs": _us(time.p10 if time else None),
            "p90 µs": _us(time.p90 if time else None),
            "p99 µs": _us(record.median("p99_ms")),
            "count": spec.count // (spec.ranks if OPS[spec.op].split else 1),
            "redop": "sum" if OPS[spec.op].reduces else "none",
            "root": ROOT if spec.op in ROOTED else -1,
            "place": "in" if spec.op in IN_PLACE else "out",
            "factor": spec.factor,
            **remark_cell(record, records),
        })  # fmt: skip
    shared = {
        name: rows[0][name] for name in SETTINGS if rows and len({r[name] for r in rows}) == 1
    }
    settings = ", ".join(f"{name} {value}" for name, value in shared.items())
    caption = f"{settings}; " if settings else ""
    caption += (
        "busbw = algbw × factor. Percentiles are taken over batches of operations. As in nccl-tests, "
        "count is one rank's part if the operation splits its data, and root is -1 if there is none. "
        "Place is 'in' if the result overwrites the input."
    )
    return Table.from_rows(
        rows, caption=caption, names=6, hidden=frozenset(shared), formats={"factor": ".4g"}
    )


def _us(ms: float | None) -> float | None:
    return None if ms is None else ms * 1e3


def _backend(spec: CommSpec) -> str:
    details = ["our ring"] if spec.algorithm == "ring" else []
    details += [spec.algorithm] if spec.algorithm in COPY_ALGORITHMS else []
    details += ["GPU tensors"] if spec.backend == "gloo" and spec.device != "cpu" else []
    nodes = f", {spec.nodes} nodes" if spec.nodes > 1 else ""
    return spec.backend + (f" ({', '.join(details)})" if details else "") + nodes


def transport(spec: CommSpec) -> str:
    """Returns the backend, and the timing method if it is not the default."""
    return _backend(spec) if spec.timing == "pipelined" else f"{_backend(spec)}, {spec.timing}"


def _wrong(record: Record) -> float | str | None:
    if record.status != "ok":
        return None
    wrong = record.median("wrong")
    return "not checked" if wrong is None else whole(wrong)


def links(records: Sequence[Record]) -> list[Link]:
    """Returns a fit for each operation that was measured at three or more sizes."""
    by_operation: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.status == "ok" and comm_spec(record).bytes:
            by_operation.setdefault(tuple(record.spec[name] for name in FIXED), []).append(record)
    return [
        _link(rows)
        for rows in by_operation.values()
        if len({comm_spec(r).bytes for r in rows}) >= 3
    ]


def _link(records: Sequence[Record]) -> Link:
    last = records[-1]
    names = ("device", "torch", "cuda", "library", "hosts", "devices", "stepgauge", "commit")
    points = {comm_spec(record).bytes: _point(record) for record in records}
    spec = comm_spec(last)
    return link(
        list(points.values()),
        settings={name: last.spec[name] for name in FIXED},
        measured={"date": last.created, **{name: last.environment.get(name) for name in names}},
        how=f"medians of the slowest rank, {spec.timing} batches of up to {spec.iterations} operations for "
        f"{spec.seconds} s a size, {spec.warmup} untimed first",
    )


def _point(record: Record) -> LinkPoint:
    time: Sample = record.metrics["time_ms"]
    return LinkPoint(
        comm_spec(record).bytes, time.median, max(NOISE, (time.p90 - time.p10) / time.median / 4)
    )


def fit_table(fits: Sequence[Link]) -> Table:
    """Returns one row per piece of a fit. Errors are medians of absolute relative errors."""
    rows = []
    for fit in fits:
        spec = CommSpec(**fit.settings)
        errors = [fit.held_out_error(0, MEGABYTE), fit.held_out_error(MEGABYTE)]
        start = fit.range_bytes[0]
        for index, piece in enumerate(fit.pieces):
            below, above = errors if index == 0 else (None, None)
            to = piece.to_bytes or fit.range_bytes[1]
            rows.append({
                "op": spec.op, "over": transport(spec), "ranks": spec.ranks, "from B": start, "to B": to,
                "α µs": piece.alpha_ms * 1e3, "1/β GB/s": _rate(piece.bytes_per_s),
                "held out < 1 MiB %": below and 100 * below,
                "held out ≥ 1 MiB %": above and 100 * above,
                "remark": _fit_remark(piece.alpha_ms, fit.held_out if index == 0 else ()),
            })  # fmt: skip
            start = to
    caption = (
        "Fit of time = α + β·bytes. The errors are medians over sizes that were held out of the fit; "
        "blank if none was."
    )
    formats = {"held out < 1 MiB %": ".2f", "held out ≥ 1 MiB %": ".2f"}
    return Table.from_rows(rows, caption=caption, names=5, formats=formats)


def _fit_remark(alpha_ms: float, held_out: Iterable[int]) -> str:
    """Returns a warning on a piece whose α or whose errors say little."""
    parts = []
    if alpha_ms <= 0:
        parts.append("α is not positive: it only fits these sizes and is not the cost of a call")
    large = [size >= MEGABYTE for size in held_out]
    if 1 in (large.count(True), large.count(False)):
        parts.append("an error comes from a single size")
    return "; ".join(parts)


def _rate(bytes_per_s: float) -> float | str:
    return "flat" if bytes_per_s > 1e14 else bytes_per_s / 1e9


def comm_blocks(records: Sequence[Record]) -> list[Block]:
    """Returns plots of bandwidth by size and of the fits, and the tables."""
    good = [record for record in records if record.status == "ok" and comm_spec(record).bytes]
    fits = links(good)
    blocks: list[Block] = []
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in good:
        spec = comm_spec(record)
        groups.setdefault((spec.ranks, transport(spec)), []).append(record)
    for (ranks, over), group in groups.items():
        for curves in _split_into_plots(_bandwidth_by_operation(group)):
            svg = lines(
                curves,
                x="bytes",
                y="busbw GB/s",
                dots=list(curves),
                scales={"x": short_bytes},
                ends=(0.0, 1.1 * _widest(good, comm_spec(group[0]).device)),
            )
            blocks.append(Plot(svg, f"Bus bandwidth by size over {over}, {ranks} ranks."))
    for fit in fits:
        if len(fits) <= MAX_FIT_PLOTS or fit.settings["op"] == "all_reduce":
            blocks.append(_fit_plot(fit, good))
    blocks.append(comm_table(records))
    return [*blocks, fit_table(fits)] if fits else blocks


def _widest(records: Sequence[Record], device: str) -> float:
    """Returns the highest bandwidth on that device: all plots of a device share a scale."""
    return max(r.median("busbw_gb_per_s") or 0.0 for r in records if comm_spec(r).device == device)


Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _bandwidth_by_operation(records: Sequence[Record]) -> Curves:
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        spec, busbw = comm_spec(record), plotted(record, "busbw_gb_per_s") or 0.0
        points.setdefault(spec.op, []).append((spec.bytes, busbw))
    drawn = {op: sorted(own) for op, own in points.items() if len(own) >= MIN_SIZES}
    return {op: tuple(zip(*own, strict=True)) for op, own in drawn.items()}  # type: ignore[misc]


def _split_into_plots(curves: Curves) -> list[Curves]:
    """Returns the curves in groups that are small enough for one plot."""
    every, most = list(curves.items()), len(SERIES)
    return [dict(every[start : start + most]) for start in range(0, len(every), most)]


def _fit_plot(fit: Link, records: Sequence[Record]) -> Plot:
    spec = CommSpec(**fit.settings)
    own = [r for r in records if all(r.spec[name] == value for name, value in fit.settings.items())]
    points = sorted((comm_spec(r).bytes, r.metrics["time_ms"].median * 1e3) for r in own)
    fitted = [point for point in points if point[0] not in fit.held_out]
    held_out = [point for point in points if point[0] in fit.held_out]
    low, high = fit.range_bytes
    sizes = [low * (high / low) ** (i / 200) for i in range(201)]
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "measured, fitted": ([size for size, _ in fitted], [us for _, us in fitted]),
        "α + β·bytes": (sizes, [fit.fitted_ms(size) * 1e3 for size in sizes]),
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
    caption = f"{spec.op} over {transport(spec)}, {spec.ranks} ranks: measured sizes and the fit."
    error = fit.held_out_error(MEGABYTE)
    if error is not None:
        is_one = sum(size >= MEGABYTE for size in fit.held_out) == 1
        of = "Error on the only held-out size" if is_one else "Median error on held-out sizes"
        caption += f" {of} from 1 MiB: {100 * error:.2f} %."
    return Plot(svg, caption)
