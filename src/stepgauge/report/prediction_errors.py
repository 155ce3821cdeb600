"""How far a prediction is off, term by term, and whether it ranks layouts rightly.

A term's error is the difference of its two times over the measured step, so that the terms of a row
add up to the error of its step.
"""

import dataclasses
import json
import statistics
from collections.abc import Collection, Mapping, Sequence

from stepgauge.report.names import flatten
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.layout import Layout
from stepgauge.spec.predictions import STEP, Row, steps_beside
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES

TERMS = ("computing", *TRAINING_PHASES, "communication", "bubble", "host", "unexplained")
# Metrics of what communication adds to a step, and of what a pipeline waits.
EXPOSED = ("exposed", "data_exposed", "tensor_exposed")
BUBBLE = "pipeline_exposed"
# In the note of a prediction from such a file (spec/hardware.py).
DISTURBED_FILE = "was calibrated beside other work"


@dataclasses.dataclass(frozen=True)
class Errors:
    """A measured step beside its prediction: signed errors, of terms and peak memory by name."""

    row: Row
    step: float
    terms: Mapping[str, float]
    peak: float | None


def errors(records: Sequence[Record]) -> list[Errors]:
    """Of each step that was predicted and measured."""
    found = []
    for row in steps_beside(records):
        step = row.error(STEP)
        if step is not None and row.record.status == "ok":
            found.append(Errors(row, step, _terms(row, step), row.error("peak_bytes")))
    return found


def _terms(row: Row, step: float) -> dict[str, float]:
    """Errors of the terms that both records have. What the prediction holds for bound by the host
    counts as the host's.
    """
    assert row.prediction is not None, "a row with an error has a prediction"
    both = row.prediction.metrics.keys() & row.record.metrics.keys()
    predicted, measured = parts(row.prediction, both), parts(row.record, both)
    whole = row.record.metrics[STEP].median
    bound_by_host = {
        phase for phase, term, *_ in row.prediction.tables.get("terms", []) if term == "host"
    }
    found: dict[str, float] = {}
    for name in predicted:
        if name in measured:
            term = "host" if name in bound_by_host else name
            found[term] = found.get(term, 0.0) + (predicted[name] - measured[name]) / whole
    rest = step - sum(found.values())
    return {name: found[name] for name in TERMS if name in found} | {"unexplained": rest}


def parts(record: Record, known: Collection[str]) -> dict[str, float]:
    """Milliseconds of a step by term, from those of the known metrics.

    Where the step was also timed without communication, all that this adds is communication's, and
    backward is the rest; under tensor or pipeline axes, which communicate in forward too, computing
    is.
    """
    names = (*TRAINING_PHASES, "synchronize", "busy", *EXPOSED, BUBBLE)
    ms = {n: record.metrics[f"{n}_ms"].median for n in names if f"{n}_ms" in known}
    step = record.metrics[STEP].median
    if "busy" in ms:  # a pipeline without an optimizer
        return {"computing": ms["busy"], "bubble": step - ms["busy"]}
    exposed = {n: ms.pop(n) for n in EXPOSED if n in ms}
    bubble = {"bubble": ms.pop(BUBBLE)} if BUBBLE in ms else {}
    if "backward" in ms:  # its wait for other ranks: apart in records of 2026-11-23 and before
        ms["backward"] += ms.pop("synchronize", 0.0)
    if not exposed and not bubble:
        return ms
    found = {"communication": sum(exposed.values()), **bubble}
    if "optimizer" in ms:
        found["optimizer"] = ms["optimizer"]
    everywhere = bubble or "tensor_exposed" in exposed
    if not everywhere and "forward" in ms:
        found["forward"] = ms["forward"]
    rest = "computing" if everywhere else "backward"
    return found | {rest: step - sum(found.values())}


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that do the same step on as many ranks, by the time that was measured.

    rank  of the truly fastest in the order of the predictions: 1 where it is ranked first
    """

    rows: Sequence[Errors]
    rank: int

    @property
    def loses(self) -> float:
        """How much longer the step that was predicted to be the fastest takes than the fastest."""
        chosen = min(self.rows, key=_predicted)
        return _measured(chosen) / _measured(self.rows[0]) - 1


def groups(found: Sequence[Errors]) -> list[Group]:
    """Of two rows or more."""
    by_work: dict[str, list[Errors]] = {}
    for each in found:
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
    """How many ranks a step was spread over."""
    layout = record.spec.get("layout")
    return Layout.parse(layout).ranks if layout else int(record.spec.get("ranks", 1))


def _work(record: Record) -> str:
    """What rows share that can stand in for each other: network, type, tokens of a step, its
    phases, and ranks.
    """
    spec, ranks = flatten(record.spec), ranks_of(record)
    of_all = "layout" in spec or record.kind == "step"
    batch = spec["batch"] * spec.get("accumulation", 1) * (1 if of_all else ranks)
    network = {**record.spec["model"], "attention": "", "norm": ""}
    phases = spec.get("phases", "step")
    return json.dumps([network, spec["precision"], batch, phases, ranks], sort_keys=True)


def sentence(records: Sequence[Record]) -> str:
    """What the errors of the predicted steps come to."""
    found = errors(records)
    if not found:
        return "No row was both predicted and measured."
    signed = statistics.fmean(each.step for each in found)
    said = (
        f"Error of the predicted step over {len(found)} rows: {_spread(found)}; signed mean "
        f"{signed:+.1%}."
    )
    quiet = [each for each in found if not is_disturbed(each.row.record)]
    if len(quiet) < len(found):
        disturbed = len(found) - len(quiet)
        said += f" {disturbed} of the rows {'was' if disturbed == 1 else 'were'} disturbed"
        said += f"; without them {_spread(quiet)}." if quiet else "."
    peaks = [abs(each.peak) for each in found if each.peak is not None]
    if peaks:
        said += f" Of peak memory: mean {statistics.fmean(peaks):.2%}, at most {max(peaks):.2%}."
    if any(DISTURBED_FILE in each.row.prediction.note for each in found if each.row.prediction):
        said += f" The hardware file {DISTURBED_FILE}: part of each error may be the calibration's."
    ranked = groups(found)
    if ranked:
        first = sum(group.rank == 1 for group in ranked)
        said += f" The fastest was ranked first in {first} of {len(ranked)} groups."
    return said


def _spread(found: Sequence[Errors]) -> str:
    sizes = [abs(each.step) for each in found]
    return f"mean {statistics.fmean(sizes):.1%}, at most {max(sizes):.1%}"
