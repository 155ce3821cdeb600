"""Reads and writes schedules as text, as JSON and as the CSV of torch.distributed.pipelining.

Text: one line per rank with actions such as `0F0 0F1 0B0`; `#` starts a comment, and `.` may mark a
pause, which has no effect. CSV: one row per rank and one cell per action; empty cells are pauses.
In all formats an action is written as stage, kind and micro-batch.
"""

import csv
import io
import json
import re
from collections.abc import Iterable

from stepgauge.spec.plan.pipeline.action import KINDS, STAGE_WORK, Action, Schedule, ScheduleError

# Longest first, so that a kind is not mistaken for a shorter one that it begins with.
_KINDS = "|".join(sorted(KINDS, key=len, reverse=True))
_ACTION = re.compile(rf"([0-9]+)({_KINDS})([0-9]*)")
# torch writes a forward and a backward that overlap in one cell: (0F3;7B0)OVERLAP_F_B
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_MOST_QUOTED = 40  # characters of a wrong action


def parse(text: str) -> Action:
    """Reads one action. Raises ScheduleError if the text is not an action."""
    match = _ACTION.fullmatch(text)
    if match is None:
        shown = text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
        hint = ". Separate actions by commas in a .csv" if len(text.split()) > 1 else ""
        raise ScheduleError(
            f"action is {shown!r}; it must be a stage, a kind and a micro-batch such as 0F3, "
            f"with a kind of {', '.join(KINDS)}{hint}"
        )
    stage, kind, micro_batch = match.groups()
    if bool(micro_batch) == (kind in STAGE_WORK):
        problem = "has no" if micro_batch else "needs a"
        raise ScheduleError(f"action is {text!r}; {kind} {problem} micro-batch")
    return Action(int(stage), kind, int(micro_batch) if micro_batch else -1)


def from_text(text: str, name: str = "custom") -> Schedule:
    """Reads the text format. Raises ScheduleError, naming the rank, for text that it cannot read."""
    lines = [line.split() for line in without_comments(text).splitlines()]
    return _schedule([words for words in lines if words], name)


def without_comments(text: str) -> str:
    """Returns the lines of a text schedule without their comments."""
    return "\n".join(line.partition("#")[0] for line in text.splitlines())


def to_text(schedule: Schedule) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in schedule.ranks)


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Reads a CSV written by torch's _dump_csv, with or without communication.

    If torch overlaps a forward and a backward in one cell, they are read as one after the other.
    Raises ScheduleError for text that it cannot read.
    """
    rows = []
    for cells in csv.reader(io.StringIO(text)):
        words = []
        for cell in cells:
            overlapped = _OVERLAPPED.fullmatch(cell.strip())
            actions = overlapped.group(1).split(";") if overlapped else [cell]
            words += [action.strip() for action in actions]
        if any(words):
            rows.append(words)
    return _schedule(rows, name)


def to_csv(schedule: Schedule) -> str:
    """Writes a CSV for torch's _load_csv, with communication if the schedule is lowered."""
    output = io.StringIO()
    csv.writer(output, lineterminator="\n").writerows(map(str, row) for row in schedule.ranks)
    return output.getvalue()


def from_json(text: str, name: str = "custom") -> Schedule:
    """Reads JSON written by `to_json`. `name` is used if the document has no name. Raises
    ScheduleError if the text is not such a document.
    """
    try:
        document = json.loads(text)
        rows = [[str(action) for action in row] for row in document["ranks"]]
    except (ValueError, TypeError, KeyError):
        raise ScheduleError(
            f"{name} is not the JSON of a schedule, such as "
            '{"name": ..., "ranks": [["0F0", "0B0"], ...]}'
        ) from None
    return _schedule(rows, str(document.get("name") or name))


def to_json(schedule: Schedule) -> str:
    rows = [[str(action) for action in row] for row in schedule.ranks]
    return json.dumps({"name": schedule.name, "ranks": rows}) + "\n"


def _schedule(rows: Iterable[list[str]], name: str) -> Schedule:
    ranks = []
    for number, words in enumerate(rows):
        try:
            ranks.append(tuple(parse(word) for word in words if word and word != "."))
        except ScheduleError as error:
            raise ScheduleError(f"rank {number}: {error}") from None
    if not ranks:
        raise ScheduleError("the schedule is empty; it needs a line of actions for each rank")
    return Schedule(tuple(ranks), name)
