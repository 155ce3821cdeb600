"""Generators of the published schedules, by name. Each is a function of the number of ranks p, of
micro-batches m and of stages per rank v, and yields the actions of rank 0, rank 1, and so on.

gpipe        all forwards, then all backwards (Huang et al. 2019)
1f1b         forwards and backwards alternate; rank r holds p - r micro-batches (Narayanan et al.
             2019)
interleaved  1f1b with v stages per rank; the bubble is v times shorter (Narayanan et al. 2021)
zb-h1        1f1b with the backward split into I and W. W is delayed to fill the bubble, which
             shrinks to a third of 1f1b's with 1f1b's memory (Qi et al. 2023, Zero Bubble Pipeline
             Parallelism)
izb          zb-h1 with v stages per rank
zbv          two stages per rank in a V: rank r has stages r and 2p - 1 - r. No bubble if F, I and W
             take equally long (Qi et al. 2023)
dualpipev    DeepSeek's DualPipe (2024) folded into the same V; each forward is paired with a
             backward
v-half,      a V whose building block repeats every six units of work. They hold a half and a third
v-min        of 1f1b's activations plus a small constant (Qi et al. 2024, Pipeline Parallelism with
             Controllable Memory)
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

F, B, I, W = FORWARD, BACKWARD, INPUT, WEIGHT  # noqa: E741 - the names used in the papers


class RankActions:
    """Collects the actions of a rank. Each added action takes the next micro-batch of its stage and
    kind.

    A pattern may run past the last micro-batch; those actions are counted but not collected.
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


def _round_size(p: int, m: int, v: int) -> int:
    """Returns how many micro-batches pass through one stage of a rank before its next stage.

    Raises ValueError if the micro-batches do not divide into rounds.
    """
    rounds = max(1, m // p) if v > 1 else 1
    if m % rounds:
        raise ValueError(
            f"micro_batches is {m}; stages are interleaved in {rounds} rounds, which must divide it"
        )
    return m // rounds


def _visits(p: int, m: int, v: int, rank: int) -> tuple[list[int], list[int]]:
    """Returns the stages of a rank in the order of its forwards, and of its backwards."""
    size = _round_size(p, m, v)
    one_round = [rank + p * chunk for chunk in range(v) for _ in range(size)]
    forwards = one_round * (m // size)
    return forwards, [rank + p * (v - 1) - (stage - rank) for stage in forwards]


def interleaved(p: int, m: int, v: int) -> Iterator[list[Action]]:
    for rank in range(p):
        row = RankActions(m)
        forwards, backwards = _visits(p, m, v, rank)
        warm_up = min(v * m, (v - 1) * _round_size(p, m, v) + 2 * (p - 1 - rank))
        for stage in forwards[:warm_up]:
            row.add(stage, F)
        for number, stage in enumerate(backwards):
            if warm_up + number < len(forwards):
                row.add(forwards[warm_up + number], F)
            row.add(stage, B)
        yield row.actions


def interleaved_zero_bubble(p: int, m: int, v: int) -> Iterator[list[Action]]:
    """Rank r delays W by r backwards. It holds r fewer activations than rank 0, so all ranks hold
    about the same memory.
    """
    for rank in range(p):
        row = RankActions(m)
        forwards, backwards = _visits(p, m, v, rank)
        warm_up = min(v * m, (v - 1) * _round_size(p, m, v) + p - 1 - rank)
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
        needed = max(m, 2 * p - 1)  # the pattern needs 2p - 1 micro-batches to fill the V
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
        _drain_dualpipev(row, p, rank)
        yield _renumbered(row.actions)


def _drain_dualpipev(row: RankActions, p: int, rank: int) -> None:
    """Adds the end of dualpipev. From its middle on, backwards are split and W fills the bubbles."""
    first, last = rank, 2 * p - 1 - rank
    waiting: collections.deque[int] = collections.deque()  # stages with a pending W
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


def _renumbered(actions: list[Action]) -> list[Action]:
    """Numbers the backwards of each stage consecutively, counting B as both I and W."""
    passed: collections.Counter[tuple[int, str]] = collections.Counter()
    numbered = []
    for stage, kind, _ in actions:
        parts = {B: (I, W), I: (I,), W: (W,)}.get(kind, (kind,))
        numbered.append(Action(stage, kind, passed[stage, parts[-1]]))
        for part in parts:
            passed[stage, part] += 1
    return numbered


PERIOD = 6  # units of work per micro-batch: F, I and W of two stages


def controllable(
    p: int, m: int, v: int, *, slopes: tuple[int, int, int, int]
) -> Iterator[list[Action]]:
    """Repeats a building block every PERIOD units, with F, I and W of one unit each.

    slopes  units between a rank and the next, for F down the V, F up, I down and I up. A micro-batch
            stays PERIOD / 12 · (sum of slopes) · p units on a rank; under 1f1b it stays 2p
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
    """Returns when each rank runs F, F, I, I, W and W of the first micro-batch.

    Tries all delays between the four diagonals and keeps those with which no two actions of a rank
    fall on the same unit of the period. Among these it picks the one that holds activations for
    the fewest units.
    """
    f_down, f_up, i_down, i_up = slopes
    candidates: list[tuple[int, list[tuple[int, ...]]]] = []
    for delay in itertools.product(range(PERIOD), repeat=3):
        f_end = (p - 1) * (f_down + f_up) + 1 + delay[0]
        i_start = f_end + 1 + delay[1]
        i_end = i_start + (p - 1) * (i_down + i_up) + 1 + delay[2]
        ranks = [
            _with_weights((f_down * r, f_end - f_up * r, i_start + i_down * r, i_end - i_up * r))
            for r in range(p)
        ]
        if all(len({time % PERIOD for time in times}) == PERIOD for times in ranks):
            held = max(t[4] - t[1] + t[5] - t[0] for t in ranks)
            candidates.append((held, ranks))
    return min(candidates)[1]


def _with_weights(times: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Appends the times of both W: each takes the first free unit of the period after its I."""
    taken = {time % PERIOD for time in times}
    placed = list(times)
    for grad_input_time in times[2:]:
        time = grad_input_time + 1
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
# Schedules with one stage per rank, with two in a V, and with any number.
SINGLE, VSHAPED, LOOPED = (
    ("gpipe", "1f1b", "zb-h1"),
    ("zbv", "dualpipev", "v-half", "v-min"),
    ("interleaved", "izb"),
)
DEFAULT_PER_RANK = 2


def stages_per_rank(name: str, requested: int = 0) -> int:
    """Returns the stages per rank: `requested` (0: two) if the schedule allows any number."""
    return 1 if name in SINGLE else 2 if name in VSHAPED else requested or DEFAULT_PER_RANK


def build(name: str, *, ranks: int, micro_batches: int, per_rank: int = 0) -> Schedule:
    """Returns the schedule of that name, not lowered.

    per_rank  stages per rank of interleaved schedules; 0: two

    Raises ValueError for an unknown name and for numbers that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(SCHEDULES)}")
    for word, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{word} is {number}; it must be at least 1")
    actual = stages_per_rank(name, per_rank)
    if per_rank not in (0, actual):
        raise ValueError(f"per_rank is {per_rank}; {name} has {actual} stages per rank")
    rows = SCHEDULES[name](ranks, micro_batches, actual)
    return Schedule(tuple(map(tuple, rows)), name)
