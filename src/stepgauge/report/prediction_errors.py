"""Errors of predicted steps, by term, and whether predictions rank layouts correctly.

A term's error is (predicted - measured) / measured step, so the terms of a row add up to the error of
its step.
"""

import dataclasses
import json
import statistics
from collections.abc import Collection, Mapping, Sequence

from stepgauge.report.names import flatten
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.layout import Layout
from stepgauge.spec.predictions import STEP, Row, pair_steps
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES

TERMS = ("computing", *TRAINING_PHASES, "communication", "bubble", "host", "unexplained")
# Metrics of exposed communication and of a pipeline's bubbles, without their suffix _ms.
EXPOSED = ("exposed", "data_exposed", "tensor_exposed")
BUBBLE = "pipeline_exposed"
# Part of a prediction's note if the calibration of its hardware file was disturbed; the text is
# written by spec/hardware.py.
DISTURBED_FILE = "was calibrated beside other work"


@dataclasses.dataclass(frozen=True)
class Errors:
    """The signed relative errors of one predicted step: of the step, its terms and its peak memory."""

    row: Row
    step: float
    terms: Mapping[str, float]
    peak: float | None


def errors(records: Sequence[Record]) -> list[Errors]:
    """Returns the errors of each step that was predicted and measured."""
    result = []
    for row in pair_steps(records):
        step = row.error(STEP)
        if step is not None and row.record.status == "ok":
            result.append(Errors(row, step, _terms(row, step), row.error("peak_bytes")))
    return result


def _terms(row: Row, step: float) -> dict[str, float]:
    """Returns the errors of the terms that both records have. A phase that is predicted to be bound by
    the host counts as the term "host".
    """
    assert row.prediction is not None, "a row with an error has a prediction"
    both = row.prediction.metrics.keys() & row.record.metrics.keys()
    predicted, measured = parts(row.prediction, both), parts(row.record, both)
    step_ms = row.record.metrics[STEP].median
    bound_by_host = {
        phase for phase, term, *_ in row.prediction.tables.get("terms", []) if term == "host"
    }
    by_term: dict[str, float] = {}
    for name in predicted:
        if name in measured:
            term = "host" if name in bound_by_host else name
            by_term[term] = by_term.get(term, 0.0) + (predicted[name] - measured[name]) / step_ms
    rest = step - sum(by_term.values())
    return {name: by_term[name] for name in TERMS if name in by_term} | {"unexplained": rest}


def parts(record: Record, known: Collection[str]) -> dict[str, float]:
    """Returns the milliseconds of a step by term, from the known metrics.

    If the step was also timed without communication, the difference is the term "communication", and
    what is left is backward. Tensor and pipeline axes also communicate in forward: what is left is
    then "computing".
    """
    names = (*TRAINING_PHASES, "synchronize", "busy", *EXPOSED, BUBBLE)
    ms = {n: record.metrics[f"{n}_ms"].median for n in names if f"{n}_ms" in known}
    step = record.metrics[STEP].median
    if "busy" in ms:  # a pipeline without an optimizer
        return {"computing": ms["busy"], "bubble": step - ms["busy"]}
    exposed = {n: ms.pop(n) for n in EXPOSED if n in ms}
    bubble = {"bubble": ms.pop(BUBBLE)} if BUBBLE in ms else {}
    if "backward" in ms:  # records up to 2026-11-23 have its wait for other ranks separately
        ms["backward"] += ms.pop("synchronize", 0.0)
    if not exposed and not bubble:
        return ms
    terms = {"communication": sum(exposed.values()), **bubble}
    if "optimizer" in ms:
        terms["optimizer"] = ms["optimizer"]
    communicates_in_forward = bubble or "tensor_exposed" in exposed
    if not communicates_in_forward and "forward" in ms:
        terms["forward"] = ms["forward"]
    rest = "computing" if communicates_in_forward else "backward"
    return terms | {rest: step - sum(terms.values())}


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that do the same work on the same number of ranks, ordered by measured time.

    rank  position of the fastest row in the order of the predictions; 1 if it is predicted fastest
    """

    rows: Sequence[Errors]
    rank: int

    @property
    def loses(self) -> float:
        """How much slower the row that was predicted fastest is than the fastest, as a fraction."""
        chosen = min(self.rows, key=_predicted)
        return _measured(chosen) / _measured(self.rows[0]) - 1


def groups(every: Sequence[Errors]) -> list[Group]:
    """Returns the groups of two or more rows."""
    by_work: dict[str, list[Errors]] = {}
    for each in every:
        by_work.setdefault(_work(each.row.record), []).append(each)
    several = [sorted(rows, key=_measured) for rows in by_work.values() if len(rows) > 1]
    return [
        Group(rows, 1 + sum(_predicted(other) < _predicted(rows[0]) for other in rows))
        for rows in several
    ]


def _measured(each: Errors) -> float:
    return each.row.record.metrics[STEP].median


def _predicted(each: Errors) -> float:
    assert each.row.prediction is not None
    return each.row.prediction.metrics[STEP].median


def ranks_of(record: Record) -> int:
    """Returns the number of ranks of a step."""
    layout = record.spec.get("layout")
    return Layout.parse(layout).ranks if layout else int(record.spec.get("ranks", 1))


def _work(record: Record) -> str:
    """Returns a key of rows with the same work: network, precision, batch over all ranks, phases and
    number of ranks.
    """
    spec, ranks = flatten(record.spec), ranks_of(record)
    is_global_batch = "layout" in spec or record.kind == "step"
    batch = spec.get("batch", 1) * spec.get("accumulation", 1) * (1 if is_global_batch else ranks)
    network = {**record.spec["model"], "attention": "", "norm": ""}
    phases = spec.get("phases", "step")
    return json.dumps([network, spec["precision"], batch, phases, ranks], sort_keys=True)


def sentence(records: Sequence[Record]) -> str:
    """Returns a summary of the errors of all predicted steps."""
    every = errors(records)
    if not every:
        return "No row was both predicted and measured."
    quiet = [each for each in every if not is_disturbed(each.row.record)]
    counted = quiet or every
    text = "" if quiet else "Other work disturbed all rows, so their errors say little. "
    text += (
        f"Error of the predicted step over {len(counted)} rows: {_size(counted)}; signed mean "
        f"{statistics.fmean(each.step for each in counted):+.1%}."
    )
    if disturbed := len(every) - len(counted):
        was, them = ("was", "it") if disturbed == 1 else ("were", "them")
        text += f" {disturbed} more {was} disturbed; with {them} {_size(every)}."
    peaks = [abs(each.peak) for each in every if each.peak is not None]
    if peaks:
        text += f" Error of the predicted peak memory: mean {statistics.fmean(peaks):.2%}, "
        text += f"at most {max(peaks):.2%}."
    if any(DISTURBED_FILE in each.row.prediction.note for each in every if each.row.prediction):
        text += f" The hardware file {DISTURBED_FILE}, which may cause part of these errors."
    ranked = groups(every)
    if ranked:
        first = sum(group.rank == 1 for group in ranked)
        text += f" The prediction ranked the fastest row first in {first} of {len(ranked)} groups."
    return text


def _size(every: Sequence[Errors]) -> str:
    sizes = [abs(each.step) for each in every]
    return f"mean {statistics.fmean(sizes):.1%}, at most {max(sizes):.1%}"
