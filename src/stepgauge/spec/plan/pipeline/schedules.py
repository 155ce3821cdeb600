"""The published schedules, by name: each a function of ranks p, micro-batches m and stages a rank
v.

gpipe        all forwards, then all backwards (Huang et al. 2019)
1f1b         a forward, a backward in turn: rank r holds p - r micro-batches (Narayanan et al. 2019)
interleaved  1f1b over v stages a rank, which shortens the bubble v times (Narayanan et al. 2021)
zb-h1        1f1b with backward in two: W waits and fills the bubble, which is a third of 1f1b's at
             1f1b's memory (Qi et al. 2023, Zero Bubble Pipeline Parallelism)
izb          the same over v stages a rank
zbv          two stages a rank in a V, rank r having stages r and 2p - 1 - r; no bubble where F, I
             and W take alike (Qi et al. 2023)
dualpipev    DeepSeek's DualPipe (2024) folded into the same V: a forward beside each backward
v-half,      the V with a building block that repeats every six units of work, so that a half and a
v-min        third of 1f1b's activations are held, and a few more (Qi et al. 2024, Pipeline
             Parallelism with Controllable Memory)
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Schedule,
)

F, B, I, W = FORWARD, BACKWARD, INPUT, WEIGHT  # noqa: E741 - as the papers name them


class RankActions:
    """The actions of a rank as they are added: of a stage and kind the next micro-batch each time.

    Micro-batches from `micro_batches` on are left out: a pattern may need more to be complete.
    """

    def __init__(self, micro_batches: int):
        self.actions: list[Action] = []
        self._limit = micro_batches
        self._next: collections.Counter[tuple[int, str]] = collections.Counter()

    def add(self, stage: int, *kinds: str) -> None:
        for kind in kinds:
            micro_batch = self._next[stage, kind]
            self._next[stage, kind] += 1
            if micro_batch < self._limit:
                self.actions.append(Action(stage, kind, micro_batch))

    def count(self, stage: int, kind: str) -> int:
        return self._next[stage, kind]


def gpipe(p: int, m: int, v: int) -> Iterator[list[Action]]:
    for rank in range(p):
        yield [Action(rank, kind, k) for kind in (F, B) for k in range(m)]


def one_f_one_b(p: int, m: int, v: int) -> Iterator[list[Action]]:
    for rank in range(p):
        row = RankActions(m)
        warm_up = min(m, p - 1 - rank)
        for _ in range(warm_up):
            row.add(rank, F)
        for _ in range(m - warm_up):
            row.add(rank, F, B)
        for _ in range(warm_up):
            row.add(rank, B)
        yield row.actions


def _rounds(p: int, m: int, v: int) -> int:
    """Micro-batches that go through one stage of a rank before its next. Raises ValueError."""
    number = max(1, m // p) if v > 1 else 1
    if m % number:
        raise ValueError(
            f"micro_batches is {m}; stages are interleaved in {number} rounds, which must divide it"
        )
    return m // number


def _visits(p: int, m: int, v: int, rank: int) -> tuple[list[int], list[int]]:
    """The stages of a rank in the order of its forwards, and of its backwards."""
    own, size = [rank + p * chunk for chunk in range(v)], _rounds(p, m, v)
    turns = [[stage] * size for stage in own]
    forwards = [stage for _ in range(m // size) for turn in turns for stage in turn]
    return forwards, [rank + p * (v - 1) - (stage - rank) for stage in forwards]


def interleaved(p: int, m: int, v: int) -> Iterator[list[Action]]:
    for rank in range(p):
        row = RankActions(m)
        forwards, backwards = _visits(p, m, v, rank)
        warm_up = min(v * m, (v - 1) * _rounds(p, m, v) + 2 * (p - 1 - rank))
        for stage in forwards[:warm_up]:
            row.add(stage, F)
        for number, stage in enumerate(backwards):
            if warm_up + number < len(forwards):
                row.add(forwards[warm_up + number], F)
            row.add(stage, B)
        yield row.actions


def interleaved_zero_bubble(p: int, m: int, v: int) -> Iterator[list[Action]]:
    """Rank r holds back r inputs of W, as many as it has fewer activations than rank 0."""
    for rank in range(p):
        row = RankActions(m)
        forwards, backwards = _visits(p, m, v, rank)
        warm_up = min(v * m, (v - 1) * _rounds(p, m, v) + p - 1 - rank)
        for stage in forwards[:warm_up]:
            row.add(stage, F)
        for number, stage in enumerate(backwards):
            if warm_up + number < len(forwards):
                row.add(forwards[warm_up + number], F)
            row.add(stage, I)
            if number >= rank:
                row.add(backwards[number - rank], W)
        for stage in backwards[max(0, len(backwards) - rank) :]:
            row.add(stage, W)
        yield row.actions


def zbv(p: int, m: int, v: int) -> Iterator[list[Action]]:
    for rank in range(p):
        row, first, last = RankActions(m), rank, 2 * p - 1 - rank
        needed = max(m, 2 * p - 1)  # to fill the V
        for _ in range(2 * (p - rank) - 1):
            row.add(first, F)
        for _ in range(rank):
            row.add(last, F)
            row.add(first, F)
        for _ in range(p - rank):
            row.add(last, F, I, W)
        while row.count(last, F) < needed:
            if row.count(first, F) < needed:
                row.add(first, F)
            row.add(first, I, W)
            row.add(last, F, I, W)
        for _ in range(rank):
            row.add(first, I)
            row.add(last, I)
        for _ in range(p - rank):
            row.add(first, I, W)
        for stage in (last, first):
            while row.count(stage, W) < needed:
                row.add(stage, W)
        yield row.actions


def dualpipev(p: int, m: int, v: int) -> Iterator[list[Action]]:
    if m < 2 * p:
        raise ValueError(f"micro_batches is {m}; dualpipev needs at least {2 * p} on {p} ranks")
    for rank in range(p):
        row, first, last = RankActions(m), rank, 2 * p - 1 - rank
        waiting: collections.deque[int] = collections.deque()  # stages whose W is to come
        for _ in range(2 * (p - 1 - rank)):
            row.add(first, F)
        for _ in range(rank + 1):
            row.add(first, F)
            row.add(last, F)
        for _ in range(p - 1 - rank):
            row.add(last, I, W, F)
        for _ in range(m - 2 * p + rank + 1):
            row.add(first, F)
            row.add(last, B)
            row.add(last, F)
            row.add(first, B)
        for _ in range(p - 1 - rank):
            row.add(last, B)
            row.add(last, F)
            row.add(first, B)
        _drain(row, waiting, p, rank)
        yield _numbered(row.actions)


def _drain(row: RankActions, waiting: collections.deque[int], p: int, rank: int) -> None:
    """The end of dualpipev: from its middle on, backwards leave their W for the bubbles."""
    first, last = rank, 2 * p - 1 - rank
    stages = [stage for _ in range(rank + 1) for stage in (last, first)]
    split = 2 * ((rank + 1) // 2) + (1 if rank % 2 == 0 else 0)
    for number, stage in enumerate(stages):
        row.add(stage, I if number >= split else B)
        if number >= split:
            waiting.append(stage)
    for _ in range(p - 1 - rank):
        if waiting:
            row.add(waiting.popleft(), W)
        row.add(first, I)
        waiting.append(first)
    while waiting:
        row.add(waiting.popleft(), W)


def _numbered(actions: list[Action]) -> list[Action]:
    """Numbers the backwards of a stage through, whether they are whole or in two parts."""
    passed: collections.Counter[tuple[int, str]] = collections.Counter()
    numbered = []
    for stage, kind, _ in actions:
        parts = {B: (I, W), I: (I,), W: (W,)}.get(kind, (kind,))
        numbered.append(Action(stage, kind, passed[stage, parts[-1]]))
        for part in parts:
            passed[stage, part] += 1
    return numbered


PERIOD = 6  # units of work a micro-batch: F, I and W of two stages


def controllable(
    p: int, m: int, v: int, *, slopes: tuple[int, int, int, int]
) -> Iterator[list[Action]]:
    """A building block that is repeated every PERIOD units, with F, I and W of one unit each.

    slopes  units from a rank to the next: of F down the V and up, of I down and up. Micro-batches
            stay PERIOD / 12 · (sum of slopes) · p units on a rank, of which 1f1b has 2p
    """
    for rank, times in enumerate(_building_block(p, slopes)):
        stages = (rank, 2 * p - 1 - rank, 2 * p - 1 - rank, rank, 2 * p - 1 - rank, rank)
        placed = sorted(
            (time + PERIOD * k, Action(stage, kind, k))
            for k in range(m)
            for time, stage, kind in zip(times, stages, (F, F, I, I, W, W), strict=True)
        )
        yield [action for _, action in placed]


@functools.cache
def _building_block(p: int, slopes: tuple[int, int, int, int]) -> list[tuple[int, ...]]:
    """When each rank runs F, F, I, I, W and W of the first micro-batch. Of the starts at which no
    two fall on the same unit of the period, those with which the fewest units are held.
    """
    down, up, back, home = slopes
    found: list[tuple[int, list[tuple[int, ...]]]] = []
    for wait in itertools.product(range(PERIOD), repeat=3):
        turn = (p - 1) * (down + up) + 1 + wait[0]
        begin = turn + 1 + wait[1]
        end = begin + (p - 1) * (back + home) + 1 + wait[2]
        ranks = [
            _with_weights((down * r, turn - up * r, begin + back * r, end - home * r))
            for r in range(p)
        ]
        if all(len({time % PERIOD for time in times}) == PERIOD for times in ranks):
            held = max(t[4] - t[1] + t[5] - t[0] for t in ranks)
            found.append((held, ranks))
    return min(found)[1]


def _with_weights(times: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The times of F, F, I and I with those of both W, each in the first free unit after its I."""
    taken = {time % PERIOD for time in times}
    placed = list(times)
    for after in times[2:]:
        time = after + 1
        while time % PERIOD in taken and len(taken) < PERIOD:
            time += 1
        taken.add(time % PERIOD)
        placed.append(time)
    return tuple(placed)


v_half = functools.partial(controllable, slopes=(1, 2, 1, 2))
v_min = functools.partial(controllable, slopes=(1, 1, 1, 1))

Generator = Callable[[int, int, int], Iterator[list[Action]]]
SCHEDULES: Mapping[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": interleaved_zero_bubble,
    "izb": interleaved_zero_bubble,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "v-half": v_half,
    "v-min": v_min,
}
# One stage a rank; two in a V; any number one after the other.
SINGLE, VSHAPED, LOOPED = (
    ("gpipe", "1f1b", "zb-h1"),
    ("zbv", "dualpipev", "v-half", "v-min"),
    ("interleaved", "izb"),
)
USUAL_PER_RANK = 2


def stages_per_rank(name: str, asked: int = 0) -> int:
    """How many stages a rank has: as asked (0: two) where the schedule leaves the choice."""
    return 1 if name in SINGLE else 2 if name in VSHAPED else asked or USUAL_PER_RANK


def build(name: str, *, ranks: int, micro_batches: int, per_rank: int = 0) -> Schedule:
    """The schedule of that name, not lowered. Raises ValueError for an unknown one, and for numbers
    that it does not do.

    per_rank  stages a rank of interleaved schedules; 0: two
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(SCHEDULES)}")
    for word, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{word} is {number}; it must be at least 1")
    own = stages_per_rank(name, per_rank)
    if per_rank not in (0, own):
        raise ValueError(f"per_rank is {per_rank}; {name} has {own} stages a rank")
    rows = SCHEDULES[name](ranks, micro_batches, own)
    return Schedule(tuple(map(tuple, rows)), name)
