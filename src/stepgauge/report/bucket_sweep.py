"""Reports on a sweep of bucket sizes, and fits a model of the step time to it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from stepgauge.report.figure import lines
from stepgauge.report.numbers import number, whole
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.table import Table
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.record import Record


@dataclasses.dataclass(frozen=True)
class Overhead:
    """The model step = base + tail / rate + per_bucket · buckets. Because communication overlaps with
    backward, only the last bucket (the tail) and the cost of each call add to the step.

    With buckets of b bytes for S bytes of gradients, the tail is at most b and there are S / b calls,
    so the step is shortest at b = sqrt(per_bucket · rate · S). If all plans have the same tail,
    ms_per_byte is 0 and the tail's cost is part of the base.
    """

    base_ms: float
    ms_per_byte: float
    per_bucket_ms: float

    @classmethod
    def fitted(
        cls, buckets: Sequence[float], tails: Sequence[float], steps_ms: Sequence[float]
    ) -> "Overhead":
        """Fits by least squares. The sweep needs at least three plans."""
        terms = [np.ones(len(buckets)), np.asarray(buckets)]
        if len(set(tails)) > 1:
            terms.append(np.asarray(tails))
        design = np.stack(terms, axis=1)
        scale = design.max(axis=0)
        base, per_bucket, *per_byte = (
            np.linalg.lstsq(design / scale, np.asarray(steps_ms), rcond=None)[0] / scale
        )
        return cls(float(base), float(per_byte[0]) if per_byte else 0.0, float(per_bucket))

    def step_ms(self, buckets: float, tail_bytes: float) -> float:
        return self.base_ms + self.ms_per_byte * tail_bytes + self.per_bucket_ms * buckets

    def best_bytes(self, total_bytes: float) -> float | None:
        """Returns the size with the shortest step, or None if the fit has no positive cost of the tail
        or of a bucket.
        """
        if self.ms_per_byte <= 0 or self.per_bucket_ms <= 0:
            return None
        return float(np.sqrt(self.per_bucket_ms / self.ms_per_byte * total_bytes))

    def sentence(self, total_bytes: float, measured_mb: float) -> str:
        """Returns the fit, its optimum, the measured optimum and the fit's limits in words."""
        tail = (
            f" {_signed(self.ms_per_byte * 1e6, '.4f')} ms per MB of the last bucket"
            if self.ms_per_byte
            else ""
        )
        buckets = f"{_signed(self.per_bucket_ms * 1e3, '.1f')} µs per bucket"
        sentences = [
            f"Least-squares fit: step = {number(self.base_ms)} ms{tail} {buckets}. "
            f"Of the measured sizes, {measured_mb:g} MB is the fastest."
        ]
        best = self.best_bytes(total_bytes)
        if best is not None:
            sentences.append(
                f"The optimum of the fit is {number(best / 1e6)} MB: the square root of the cost of "
                "a bucket times the link's rate times the gradients' bytes."
            )
        if not self.ms_per_byte:
            sentences.append(
                "All plans end with the same bucket, so its cost cannot be separated from the rest."
            )
        if self.ms_per_byte < 0 or self.per_bucket_ms < 0:
            sentences.append(
                "A fitted cost is negative, which no real cost can be: the fit describes only these "
                "sizes and has no optimum."
            )
        if self.per_bucket_ms < 0:
            sentences.append(
                "More buckets were faster. The model has no term for copies: a gradient as large as "
                "a bucket is sent without a copy, smaller ones are first copied together."
            )
        return " ".join(sentences)


def _signed(value: float, digits: str) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):{digits}}"


def _sweep(records: Sequence[Record]) -> list[Record]:
    """Returns the most rows that differ only in their bucket size, by bucket size."""
    sweeps: dict[tuple[str, ...], dict[float, Record]] = {}
    for record in records:
        spec = record.spec
        if spec["wrapper"] == "bucketed" and spec.get("reduce_dtype", "own") == "own":
            rest = dataclasses.replace(record, spec={**spec, "bucket_mb": None})
            sweeps.setdefault(rest.identity, {})[float(spec["bucket_mb"])] = record
    longest = max(sweeps.values(), key=len, default={})
    return [longest[size] for size in sorted(longest)]


def overhead_blocks(records: Sequence[Record]) -> list[Block]:
    """Returns the fitted and the measured step by bucket size, or nothing if no rows differ only in
    their bucket size, of which there must be at least four.
    """
    rows = _sweep(records)
    if len(rows) < 4:
        return []
    if any(map(is_disturbed, rows)):
        return [
            Text("No model is fitted to the bucket sweep, because one of its rows was disturbed.")
        ]
    measured = [r.metrics["step_ms"].median for r in rows]
    buckets, tails = ([r.metrics[name].median for r in rows] for name in ("buckets", "tail_bytes"))
    model = Overhead.fitted(buckets, tails, measured)
    predicted = [model.step_ms(n, tail) for n, tail in zip(buckets, tails, strict=True)]
    megabytes = [float(r.spec["bucket_mb"]) for r in rows]
    fastest = megabytes[int(np.argmin(measured))]
    total = rows[0].metrics["gradient_bytes"].median
    curves = {"measured": (megabytes, measured), "fit": (megabytes, predicted)}
    svg = lines(curves, x="bucket MB", y="ms per step", dots=("measured",))
    columns = ("bucket MB", "buckets", "last bucket MB", "measured ms", "fit ms")
    megabytes_last = [tail / 1e6 for tail in tails]
    cells = zip(megabytes, map(whole, buckets), megabytes_last, measured, predicted, strict=True)
    caption = "Step time by bucket size: measured and fitted."
    table = Table(columns, list(cells), formats={"bucket MB": "g"}, caption=caption)
    return [Plot(svg, "Step time by bucket size."), Text(model.sentence(total, fastest)), table]
