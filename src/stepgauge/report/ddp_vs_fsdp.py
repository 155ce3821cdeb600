"""Replicated against sharded training: rows that differ in the seed alone become one, and the
memory's gap by part.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from stepgauge.report.names import flatten
from stepgauge.report.numbers import scaled
from stepgauge.report.table import Table
from stepgauge.spec.ddp_vs_fsdp import PAIRS
from stepgauge.spec.record import Record

KEPT = ("parameter", "gradient", "optimizer")
PARTS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "rest": "rest",
}
_NAMES = ("size", "wrapper", "ranks", "context_length", "precision")


def aggregated(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One object for the seeds of a configuration: mean and std of throughput, step and peak
    memory, plain JSON.

    Throughput and step are means over each seed's steps, spread over seeds; the peak is spread over
    ranks and seeds.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            groups.setdefault(str({**record.spec, "seed": None}), []).append(record)
    return [_of_seeds(group) for group in groups.values()]


def _of_seeds(records: Sequence[Record]) -> dict[str, Any]:
    spec = flatten(records[0].spec)
    steps = [record.metrics["step_ms"].mean for record in records]
    rates = [record.metrics["tokens_per_s"].mean / spec["context_length"] for record in records]
    peaks = [peak for record in records for peak in record.series.get("rank_peak_bytes", [])]
    parts = [f"{part}_bytes" for part in PARTS if f"{part}_bytes" in records[0].metrics]
    return {
        **{name: spec[name] for name in _NAMES},
        "global_batch": spec["batch"] * spec["ranks"],
        "seeds": [record.spec["seed"] for record in records],
        "samples_per_s": _spread(rates),
        "step_ms": _spread(steps),
        **({"peak_bytes": _spread(peaks)} if peaks else {}),
        **{
            part: statistics.fmean(record.metrics[part].median for record in records)
            for part in parts
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The objects of `aggregated` as a table, mean and standard deviation side by side."""
    figures = {
        "samples/s": ("samples_per_s", ""),
        "step ms": ("step_ms", ""),
        "peak GiB": ("peak_bytes", "bytes"),
    }
    shown = [
        {
            **{name: row[name] for name in ("size", "wrapper", "precision", "ranks")},
            "global batch": row["global_batch"],
            "seeds": len(row["seeds"]),
            **{
                f"{text} {part}": scaled(row.get(name, {}).get(part), unit)
                for text, (name, unit) in figures.items()
                for part in ("mean", "std")
            },
        }
        for row in rows
    ]
    caption = (
        "Throughput and step over seeds, peak memory over ranks and seeds; std is that of a sample."
    )
    return Table.from_rows(shown, caption=caption, names=3)


def gap_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What sharding frees a rank of, by part: the replicating wrapper's bytes less its own."""
    by_wrapper = {(row["wrapper"], *_load(row)): row for row in rows}
    cells = []
    for row in rows:
        for replicated, sharded in PAIRS:
            other = by_wrapper.get((sharded, *_load(row)))
            if row["wrapper"] != replicated or other is None or "optimizer_bytes" not in row:
                continue
            gap = (
                row["peak_bytes"]["mean"] - other["peak_bytes"]["mean"]
                if "peak_bytes" in row
                else None
            )
            freed = (row["ranks"] - 1) / row["ranks"] * sum(row[f"{part}_bytes"] for part in KEPT)
            names = {text: f"{part}_bytes" for part, text in PARTS.items()}
            by_part = {
                text: row[name] - other[name] if name in row else None
                for text, name in names.items()
            }
            sizes = {"peak": gap, "expected": freed, **by_part}
            cells.append({
                "wrappers": f"{replicated} less {sharded}",
                "ranks": row["ranks"],
                "global batch": row["global_batch"],
                **{f"{name} GiB": scaled(size, "bytes") for name, size in sizes.items()},
            })  # fmt: skip
    caption = (
        "Memory that sharding saves on a rank. Expected: (N−1)/N of parameters, gradients and "
        "optimizer state; the rest is activations, which both have, and what a wrapper keeps for communication. On a "
        "CPU peaks are those of processes and not of tensors: they and the rest are left out."
    )
    return Table.from_rows(cells, caption=caption, names=1)


def _load(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        row[name] for name in ("size", "ranks", "global_batch", "context_length", "precision")
    )
