"""Decides which candidates are measured, and how much each choice of the winner gains.

If steps can be predicted, all candidates are, and the best few are measured. Of very many candidates,
only the best for each value of the longest choice are predicted, found one choice at a time. Values
that no prediction covers are then measured on the fastest candidate.

If no step can be predicted, one choice after the other is measured, with the best values of the choices
before it.

At the end, the fastest and the default step are measured again in turns. All other measurements follow
one another, and the machine's speed may have changed in between.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.record import Record
from stepgauge.tune.choices import Chosen, Space

Measure = Callable[[Sequence[Any]], list[Record]]
Predict = Callable[[Any], Record | None]
MOST_PREDICTED = 1500  # candidates; a prediction of a small step takes milliseconds
ROUNDS = 2  # through all choices, when they are searched one at a time


@dataclasses.dataclass(frozen=True)
class Gain:
    """A choice of the winner that differs from the default.

    ratio      the winner's speed over that of the same step with the default value; None if that did
               not run
    disturbed  other work disturbed one of these two rows
    """

    choice: str
    value: Any
    default: Any
    ratio: float | None
    disturbed: bool = False


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The default step, the fastest that was measured, and the gain of each of its choices.

    predicted      number of predicted candidates; 0 if one choice after the other was measured
    candidates     number of combinations
    measured_only  values that no prediction covers, measured on the fastest
    """

    default: Record
    winner: Record
    gains: Sequence[Gain]
    predicted: int
    candidates: int
    measured_only: Sequence[tuple[str, Any]] = ()

    @property
    def speedup(self) -> float | None:
        default = rate(self.default)
        return rate(self.winner) / default if default else None


def rate(record: Record) -> float:
    """Returns tokens per second, or steps per second if tokens are unknown; 0 if it did not run."""
    if record.status != "ok":
        return 0.0
    step_ms = record.median("step_ms")
    return record.median("tokens_per_s") or (1e3 / step_ms if step_ms else 0.0)


def tune(
    space: Space, measure: Measure, predict: Predict, *, in_turns: Measure, best: int = 4
) -> Tuned:
    """Finds the fastest step of the space.

    Measures the default step and the `best` predicted ones, or one choice at a time. Then measures the
    fastest and the default step `in_turns`; the default may turn out to be faster. Raises ValueError
    if no candidate ran.
    """
    predicted = _predicted(space, predict)
    unpredicted: list[tuple[str, Any]] = []
    if predicted:
        ranked = sorted(predicted, key=lambda pair: -rate(pair[0]))
        tried = [space.defaults, *(chosen for _, chosen in ranked[:best])]
        winner = _fastest(space, tried, measure)
        unpredicted = _unpredicted(space, winner, predict)
        for name, value in unpredicted:
            winner = _fastest(space, [winner, {**winner, name: value}], measure)
    else:
        winner = _one_at_a_time(space, measure)
    default, fastest = (measure([space.spec(chosen)])[0] for chosen in (space.defaults, winner))
    if not rate(fastest):
        raise ValueError(f"no candidate ran: {fastest.note}")
    gains = _gains(space, winner, measure)
    if gains and rate(default):
        default, fastest = in_turns([space.spec(chosen) for chosen in (space.defaults, winner)])
        if rate(default) >= rate(fastest):
            fastest, gains = default, []
        elif len(gains) == 1:  # without it, the winner is the default step
            disturbed = is_disturbed(default) or is_disturbed(fastest)
            ratio = rate(fastest) / rate(default)
            gains = [dataclasses.replace(gains[0], ratio=ratio, disturbed=disturbed)]
    return Tuned(default, fastest, gains, len(predicted), space.size, unpredicted)


def _predicted(space: Space, predict: Predict) -> list[tuple[Record, Chosen]]:
    """Returns the predictions of all candidates that have one.

    Of more than MOST_PREDICTED, only the best for each value of the longest choice.
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
            best: Chosen = {**space.defaults, longest: start}
            for name, values in ROUNDS * rest:
                best = max(({**best, name: value} for value in values), key=rate_of)
            tried.append(best)
    return [(record, chosen) for chosen in tried if (record := record_of(chosen))]


def _unpredicted(space: Space, winner: Chosen, predict: Predict) -> list[tuple[str, Any]]:
    """Returns values with which the winner would be possible, but could not be predicted."""
    unpredicted = []
    for name, values in space.choices.items():
        for value in values:
            spec = space.spec({**winner, name: value})
            if spec is not None and predict(spec) is None:
                unpredicted.append((name, value))
    return unpredicted


def _fastest(space: Space, tried: Sequence[Chosen], measure: Measure) -> Chosen:
    possible = [chosen for chosen in tried if space.spec(chosen) is not None]
    records = measure([space.spec(chosen) for chosen in possible])
    fastest = max(range(len(possible)), key=lambda index: rate(records[index]))
    return possible[fastest]


def _one_at_a_time(space: Space, measure: Measure) -> Chosen:
    chosen: Chosen = space.defaults
    for name, values in space.choices.items():
        chosen = _fastest(space, [{**chosen, name: value} for value in values], measure)
    return chosen


def _gains(space: Space, winner: Chosen, measure: Measure) -> list[Gain]:
    """Compares the winner with itself without each choice that differs from the default."""
    gains = []
    for name, value in winner.items():
        default = space.defaults[name]
        if value == default:
            continue
        specs = [space.spec(winner), space.spec({**winner, name: default})]
        with_choice, *without = measure([spec for spec in specs if spec is not None])
        slower = rate(without[0]) if without else 0.0
        ratio = rate(with_choice) / slower if slower else None
        disturbed = any(map(is_disturbed, (with_choice, *without)))
        gains.append(Gain(name, value, default, ratio, disturbed))
    return sorted(gains, key=lambda gain: -(gain.ratio or math.inf))
