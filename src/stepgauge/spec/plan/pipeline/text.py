"""Schedules as people write them, and as torch.distributed.pipelining's CSV.

Text: a line a rank of actions such as `0F0 0F1 0B0`; `#` begins a remark, `.` stands for a pause
and says nothing. CSV: a row a rank, a cell an action, empty cells are pauses. In both an action is
its stage, its kind and its micro-batch.
"""

import csv
import io
import json
import re
from collections.abc import Iterable

from stepgauge.spec.plan.pipeline.action import KINDS, OF_STAGES, Action, Schedule, ScheduleError

# longest first: I is a kind, and so would be the W of a longer name
_KINDS = "|".join(sorted(KINDS, key=len, reverse=True))
_ACTION = re.compile(rf"([0-9]+)({_KINDS})([0-9]*)")
# torch runs a forward and a backward "overlapped" in one cell: (0F3;7B0)OVERLAP_F_B
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse(text: str) -> Action:
    """Raises ScheduleError for what is no action."""
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"action is {text!r}; it must be a stage, a kind and a micro-batch such as 0F3, "
            f"with a kind of {', '.join(KINDS)}"
        )
    stage, kind, micro_batch = found.groups()
    if bool(micro_batch) == (kind in OF_STAGES):
        wanted = "has no" if micro_batch else "needs a"
        raise ScheduleError(f"action is {text!r}; {kind} {wanted} micro-batch")
    return Action(int(stage), kind, int(micro_batch) if micro_batch else -1)


def from_text(text: str, name: str = "custom") -> Schedule:
    """Raises ScheduleError, which names the line, for what cannot be read."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return _schedule([words for words in lines if words], name)


def to_text(schedule: Schedule) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in schedule.ranks)


def from_csv(text: str, name: str = "custom") -> Schedule:
    """What torch's _dump_csv writes, with or without communication. Raises ScheduleError.

    A forward and backward that torch overlaps in one cell are read as one after the other.
    """
    rows = []
    for cells in csv.reader(io.StringIO(text)):
        words = []
        for cell in cells:
            overlapped = _TOGETHER.fullmatch(cell.strip())
            actions = overlapped.group(1).split(";") if overlapped else [cell]
            words += [action.strip() for action in actions]
        if any(words):
            rows.append(words)
    return _schedule(rows, name)


def to_csv(schedule: Schedule) -> str:
    """What torch's _load_csv reads: with communication if the schedule is lowered."""
    output = io.StringIO()
    csv.writer(output, lineterminator="\n").writerows(map(str, row) for row in schedule.ranks)
    return output.getvalue()


def from_json(text: str, name: str = "custom") -> Schedule:
    """What to_json writes; `name` where it has none. Raises ScheduleError for another document."""
    try:
        found = json.loads(text)
        rows = [[str(action) for action in row] for row in found["ranks"]]
    except (ValueError, TypeError, KeyError):
        raise ScheduleError(
            f'{name} is no JSON of a schedule, such as {{"name": ..., "ranks": [["0F0", "0B0"], ...]}}'
        ) from None
    return _schedule(rows, str(found.get("name") or name))


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
        raise ScheduleError("the schedule is empty; it must have a line of actions for each rank")
    return Schedule(tuple(ranks), name)
