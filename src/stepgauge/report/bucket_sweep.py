"""A sweep of bucket sizes, and the model of what buckets cost a step that is fitted to it."""

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
    """step = base + tail / rate + per_bucket · buckets: with overlap only the last bucket and the
    calls remain.

    The tail of plans of size b over S bytes is b at most and the calls are S / b, so that the step
    is shortest at b = sqrt(per_bucket · rate · S). Where all plans end alike, ms_per_byte is 0: the
    tail's cost is in the base.
    """

    base_ms: float
    ms_per_byte: float
    per_bucket_ms: float

    @classmethod
    def fitted(
        cls, buckets: Sequence[float], tails: Sequence[float], steps_ms: Sequence[float]
    ) -> "Overhead":
        """Least squares over a sweep of at least three plans."""
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
        """The size at which the step is shortest; None where the fit has no cost of the tail, or
        none of a bucket.
        """
        if self.ms_per_byte <= 0 or self.per_bucket_ms <= 0:
            return None
        return float(np.sqrt(self.per_bucket_ms / self.ms_per_byte * total_bytes))

    def sentence(self, total_bytes: float, measured_mb: float) -> str:
        """The fit in words, its optimum beside the measured one, and what it cannot say."""
        tail = (
            f" {_signed(self.ms_per_byte * 1e6, '.4f')} ms an MB of the last bucket"
            if self.ms_per_byte
            else ""
        )
        fit = f"step = {number(self.base_ms)} ms{tail} {_signed(self.per_bucket_ms * 1e3, '.1f')} µs a bucket"
        said = [
            f"{fit}, by least squares. Of the sizes measured {measured_mb:g} MB is the quickest."
        ]
        best = self.best_bytes(total_bytes)
        if best is not None:
            said.append(
                f"The model has its optimum at {number(best / 1e6)} MB, the root of a bucket's "
                "cost times the link's rate times the gradients' bytes."
            )
        if not self.ms_per_byte:
            said.append(
                "All plans end with the same bucket, so that its cost cannot be told from the rest."
            )
        if self.ms_per_byte < 0 or self.per_bucket_ms < 0:
            said.append(
                "A cost below zero is no cost: the line describes these sizes, predicts no other, "
                "and it has no optimum here."
            )
        if self.per_bucket_ms < 0:
            said.append(
                "More buckets were quicker: gradients of the bucket's size are sent as they are, "
                "smaller ones are copied together, for which the line has no term."
            )
        return " ".join(said)


def _signed(value: float, digits: str) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):{digits}}"


def overhead_blocks(records: Sequence[Record]) -> list[Block]:
    """The model fitted to the bucket sweep, beside what was measured."""
    sweep = [
        r
        for r in records
        if r.spec["wrapper"] == "bucketed" and r.spec.get("reduce_dtype", "own") == "own"
    ]
    largest = [r for r in sweep if r.spec["size"] == sweep[-1].spec["size"]] if sweep else []
    rows = sorted(largest, key=lambda r: float(r.spec["bucket_mb"]))
    if len(rows) < 4:
        return []
    if len([r for r in rows if not is_disturbed(r)]) < len(rows):
        return [Text("A row of the bucket sweep was disturbed: no model is fitted to it.")]
    measured = [r.metrics["step_ms"].median for r in rows]
    buckets, tails = ([r.metrics[name].median for r in rows] for name in ("buckets", "tail_bytes"))
    model = Overhead.fitted(buckets, tails, measured)
    predicted = [model.step_ms(n, tail) for n, tail in zip(buckets, tails, strict=True)]
    megabytes = [float(r.spec["bucket_mb"]) for r in rows]
    quickest = megabytes[int(np.argmin(measured))]
    total = rows[0].metrics["gradient_bytes"].median
    curves = {"measured": (megabytes, measured), "model": (megabytes, predicted)}
    columns = ("bucket MB", "buckets", "last bucket MB", "measured ms", "model ms")
    megabytes_last = [tail / 1e6 for tail in tails]
    cells = zip(megabytes, map(whole, buckets), megabytes_last, measured, predicted, strict=True)
    caption = "Bucket sweep and the fitted model."
    table = Table(columns, list(cells), formats={"bucket MB": "g"}, caption=caption)
    return [
        Plot(
            lines(curves, x="bucket MB", y="ms a step", dots=("measured",)), "Step by bucket size."
        ),
        Text(model.sentence(total, quickest)),
        table,
    ]
