"""Which candidates are measured, and what each choice of the winner gained.

Where steps can be predicted, all candidates are, or of very many those on the way down from each
value of the longest choice, and the best few are measured; values that no prediction covers are
then measured on the fastest. Where no step can be predicted, one choice after the other is measured:
each of its values with the best of the choices before it. At the end the fastest and the usual step
are measured once more, in turns: all before was measured one after the other, on a machine whose
speed may have changed on the way.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.spec.record import Record
from stepgauge.tune.choices import Chosen, Space

Measure = Callable[[Sequence[Any]], list[Record]]
Predict = Callable[[Any], Record | None]
MOST_PREDICTED = 1500  # candidates; predictions of small steps take milliseconds
ROUNDS = 2  # through all choices on the way down


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
    candidates how many combinations there were
    measured_only  values that no prediction covers, measured on the fastest
    """

    usual: Record
    winner: Record
    gains: Sequence[Gain]
    predicted: int
    candidates: int
    measured_only: Sequence[tuple[str, Any]] = ()

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


def tune(
    space: Space, measure: Measure, predict: Predict, *, in_turns: Measure, best: int = 4
) -> Tuned:
    """Measures the usual step and the `best` by prediction, or one choice at a time; then the
    fastest and the usual one `in_turns`, where the usual one may turn out to be the faster.

    Raises ValueError where no candidate ran.
    """
    predicted = _predicted(space, predict)
    unpredicted: list[tuple[str, Any]] = []
    if predicted:
        ranked = sorted(predicted, key=lambda pair: -rate(pair[0]))
        tried = [space.usual, *(chosen for _, chosen in ranked[:best])]
        winner = _fastest(space, tried, measure)
        unpredicted = _unpredicted(space, winner, predict)
        for name, value in unpredicted:
            winner = _fastest(space, [winner, {**winner, name: value}], measure)
    else:
        winner = _one_at_a_time(space, measure)
    usual, fastest = (measure([space.spec(chosen)])[0] for chosen in (space.usual, winner))
    if not rate(fastest):
        raise ValueError(f"no candidate ran: {fastest.note}")
    gains = _gains(space, winner, measure)
    if gains and rate(usual):
        usual, fastest = in_turns([space.spec(chosen) for chosen in (space.usual, winner)])
        if rate(usual) >= rate(fastest):
            fastest, gains = usual, []
        elif len(gains) == 1:  # without it the winner is the usual step
            gains = [dataclasses.replace(gains[0], ratio=rate(fastest) / rate(usual))]
    return Tuned(usual, fastest, gains, len(predicted), space.size, unpredicted)


def _predicted(space: Space, predict: Predict) -> list[tuple[Record, Chosen]]:
    """The candidates that can be predicted: all, or of very many the best for each value of the
    longest choice, one choice at a time.
    """
    known: dict[Any, Record | None] = {}

    def record_of(chosen: Chosen) -> Record | None:
        spec = space.spec(chosen)
        if spec is not None and spec not in known:
            known[spec] = predict(spec)
        return known.get(spec)

    def rate_of(chosen: Chosen) -> float:
        record = record_of(chosen)
        return rate(record) if record else 0.0

    if space.size <= MOST_PREDICTED:
        tried = space.all()
    else:
        longest = max(space.choices, key=lambda name: len(space.choices[name]))
        rest = [pair for pair in space.choices.items() if pair[0] != longest]
        tried = []
        for start in space.choices[longest]:
            best: Chosen = {**space.usual, longest: start}
            for name, values in ROUNDS * rest:
                best = max(({**best, name: value} for value in values), key=rate_of)
            tried.append(best)
    return [(record, chosen) for chosen in tried if (record := record_of(chosen))]


def _unpredicted(space: Space, winner: Chosen, predict: Predict) -> list[tuple[str, Any]]:
    """Values that the winner could have, but then could not be predicted."""
    found = []
    for name, values in space.choices.items():
        for value in values:
            spec = space.spec({**winner, name: value})
            if spec is not None and predict(spec) is None:
                found.append((name, value))
    return found


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
    found = []
    for name, value in winner.items():
        usual = space.usual[name]
        if value == usual:
            continue
        specs = [space.spec(winner), space.spec({**winner, name: usual})]
        ours, *others = measure([spec for spec in specs if spec is not None])
        slower = rate(others[0]) if others else 0.0
        ratio = rate(ours) / slower if slower else None
        found.append(Gain(name, value, usual, ratio))
    return sorted(found, key=lambda gain: -(gain.ratio or math.inf))
