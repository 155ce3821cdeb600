"""Records that differ in one field alone, their seed say, as one record."""

import dataclasses
from collections.abc import Sequence

from stepgauge.report.names import flatten
from stepgauge.spec.record import Record, Sample


def over(records: Sequence[Record], field: str) -> list[Record]:
    """One record for those of one machine that agree in all but the field. Its figures are samples: of times and
    rates each record's mean, of bytes those of each rank. The field has all values, as a text.

    Raises ValueError for a field that no record has.
    """
    if not any(field in record.spec for record in records):
        known = dict.fromkeys(name for record in records for name in record.spec)
        raise ValueError(f"over is {field!r}; choose from {', '.join(known)}")
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.status == "ok":
            same = dataclasses.replace(record, spec={**record.spec, field: None})
            groups.setdefault(same.identity, []).append(record)
    return [_together(group, field) for group in groups.values()]


def _together(records: Sequence[Record], field: str) -> Record:
    first = records[0]
    metrics = {}
    for name, sample in first.metrics.items():
        if all(name in record.metrics for record in records):
            figures = [figure for record in records for figure in _values(record, name)]
            metrics[name] = Sample.of(figures, sample.unit)
    values = " ".join(str(flatten(record.spec).get(field)) for record in records)
    spec = {**first.spec, field: values}
    return dataclasses.replace(first, spec=spec, metrics=metrics, series={}, tables={})


def _values(record: Record, metric: str) -> list[float]:
    if metric.endswith("_bytes") and f"rank_{metric}" in record.series:
        return record.series[f"rank_{metric}"]
    return [record.metrics[metric].mean]
