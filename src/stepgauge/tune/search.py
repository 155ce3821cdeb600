"""Which candidates are measured, and what each choice of the winner gained.

Where steps can be predicted, all candidates are, and the best few are measured. Where they cannot,
one choice after the other is: each of its values with the best of the choices before it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.spec.record import Record
from stepgauge.tune.choices import Chosen, Space

Measure = Callable[[Sequence[Any]], list[Record]]
Predict = Callable[[Any], Record | None]


@dataclasses.dataclass(frozen=True)
class Gain:
    """A choice of the winner that is not the usual value, and how many times as fast the winner is
    as the same step with the usual value; None where that step did not run.
    """

    choice: str
    value: Any
    usual: Any
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The usual step, the fastest that was measured, and what its choices gained.

    predicted  how many candidates were predicted; 0: one choice at a time was measured
    candidates how many there were
    """

    usual: Record
    winner: Record
    gains: Sequence[Gain]
    predicted: int
    candidates: int

    @property
    def speedup(self) -> float | None:
        usual = rate(self.usual)
        return rate(self.winner) / usual if usual else None


def rate(record: Record) -> float:
    """Tokens a second; of a network whose tokens are not known steps. 0 where it did not run."""
    if record.status != "ok":
        return 0.0
    step = record.median("step_ms")
    return record.median("tokens_per_s") or (1e3 / step if step else 0.0)


def tune(space: Space, measure: Measure, predict: Predict, *, best: int = 4) -> Tuned:
    """Measures the usual step and the `best` by prediction, or one choice at a time.

    Raises ValueError where no candidate ran.
    """
    every = space.all()
    predicted = [(record, chosen) for chosen in every if (record := predict(space.spec(chosen)))]
    if predicted:
        ranked = sorted(predicted, key=lambda pair: -rate(pair[0]))
        tried = [space.usual, *(chosen for _, chosen in ranked[:best])]
        winner = _fastest(space, tried, measure)
    else:
        winner = _one_at_a_time(space, measure)
    usual, fastest = (measure([space.spec(chosen)])[0] for chosen in (space.usual, winner))
    if not rate(fastest):
        raise ValueError(f"no candidate ran: {fastest.note}")
    return Tuned(usual, fastest, _gains(space, winner, measure), len(predicted), len(every))


def _fastest(space: Space, tried: Sequence[Chosen], measure: Measure) -> Chosen:
    possible = [chosen for chosen in tried if space.spec(chosen) is not None]
    records = measure([space.spec(chosen) for chosen in possible])
    place = max(range(len(possible)), key=lambda place: rate(records[place]))
    return possible[place]


def _one_at_a_time(space: Space, measure: Measure) -> Chosen:
    chosen: Chosen = space.usual
    for name, values in space.choices.items():
        chosen = _fastest(space, [{**chosen, name: value} for value in values], measure)
    return chosen


def _gains(space: Space, winner: Chosen, measure: Measure) -> list[Gain]:
    """Of each choice that is not usual: the winner beside itself without it."""
    changed = {n: value for n, value in winner.items() if value != space.usual[n]}
    found = []
    for name, value in changed.items():
        without = {**winner, name: space.usual[name]}
        specs = [spec for chosen in (winner, without) if (spec := space.spec(chosen)) is not None]
        ours, *others = measure(specs)
        slower = rate(others[0]) if others else 0.0
        ratio = rate(ours) / slower if slower else None
        found.append(Gain(name, value, space.usual[name], ratio))
    return sorted(found, key=lambda gain: -(gain.ratio or float("inf")))
