"""Merges records that differ only in one field, such as the seed."""

import dataclasses
from collections.abc import Sequence

from stepgauge.report.names import flatten
from stepgauge.spec.record import Record, Sample


def merge_over(records: Sequence[Record], field: str) -> list[Record]:
    """Merges the records of one machine that agree in all fields but this one.

    A merged time or rate is a sample of each record's mean; merged bytes are a sample of all ranks'
    bytes. The field's value is a text of all values. Raises ValueError if no record has the field.
    """
    if not any(field in record.spec for record in records):
        known = dict.fromkeys(name for record in records for name in record.spec)
        raise ValueError(f"over is {field!r}; choose from {', '.join(known)}")
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.status == "ok":
            same = dataclasses.replace(record, spec={**record.spec, field: None})
            groups.setdefault(same.identity, []).append(record)
    return [_merged(group, field) for group in groups.values()]


def _merged(records: Sequence[Record], field: str) -> Record:
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
