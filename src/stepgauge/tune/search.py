"""Decides which candidates are measured, and how much each choice of the winner gains.

If steps can be predicted, all candidates are, and the best few are measured. Of very many candidates,
only the best for each value of the longest choice are predicted, found one choice at a time. Values
that no prediction covers are then measured on the fastest candidate.

If no step can be predicted, one choice after the other is measured, with the best values of the choices
before it.

At the end, the fastest and the baseline are measured again in turns. All other measurements follow
one another, and the machine's speed may have changed in between.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.cost.planning.planner import Hear
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.record import Record
from stepgauge.tune.choices import Chosen, Space

Measure = Callable[[Sequence[Any], str], list[Record]]  # steps, and a phrase on what they are
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
    """The baseline, the fastest that was measured, and the gain of each of its choices.

    predicted      number of predicted candidates; 0 if one choice after the other was measured
    candidates     number of combinations
    measured_only  values that no prediction covers, measured on the fastest
    overtaken      the fastest step of the search, if the baseline was faster when both were measured
                   again
    """

    default: Record
    winner: Record
    gains: Sequence[Gain]
    predicted: int
    candidates: int
    measured_only: Sequence[tuple[str, Any]] = ()
    overtaken: Record | None = None

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
    space: Space,
    predicted: Sequence[tuple[Record, Chosen]],
    measure: Measure,
    predict: Predict,
    *,
    in_turns: Measure,
    best: int = 4,
) -> Tuned:
    """Finds the fastest step of the space.

    predicted  what predicted_candidates returned for the space; may be empty

    Measures the baseline and the `best` predicted ones, or one choice at a time. Then measures the
    fastest and the baseline `in_turns`; the baseline may turn out to be faster. Raises ValueError
    if no candidate ran.
    """
    unpredicted: list[tuple[str, Any]] = []
    if predicted:
        ranked = [chosen for _, chosen in sorted(predicted, key=lambda pair: -rate(pair[0]))]
        winner, unpredicted = _among_predicted(space, ranked[:best], measure, predict)
    else:
        winner = _one_at_a_time(space, measure)
    compared = [space.spec(chosen) for chosen in (space.defaults, winner)]
    default, fastest = measure(compared, "the baseline and the fastest step")
    if not rate(fastest):
        raise ValueError(f"no candidate ran: {fastest.note}")
    gains = _gains(space, winner, measure)
    overtaken = None
    if gains and rate(default):
        default, fastest = in_turns(
            compared, "the baseline and the fastest step again, alternating"
        )
        if rate(default) >= rate(fastest):
            overtaken, fastest, gains = fastest, default, []
        elif len(gains) == 1:  # without it, the winner is the baseline
            disturbed = is_disturbed(default) or is_disturbed(fastest)
            ratio = rate(fastest) / rate(default)
            gains = [dataclasses.replace(gains[0], ratio=ratio, disturbed=disturbed)]
    return Tuned(default, fastest, gains, len(predicted), space.size, unpredicted, overtaken)


def predicted_candidates(
    space: Space, predict: Predict, hear: Hear = lambda doing, done, total: None
) -> list[tuple[Record, Chosen]]:
    """Returns the predictions of all candidates that have one. `hear` is called with the progress.

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
        rest: list[tuple[str, Sequence[Any]]] = []
        starts = space.all()
    else:
        longest = max(space.choices, key=lambda name: len(space.choices[name]))
        rest = [pair for pair in space.choices.items() if pair[0] != longest]
        starts = [{**space.defaults, longest: value} for value in space.choices[longest]]
    found = []
    for done, best in enumerate(starts):
        hear("predicting", done, len(starts))
        for name, values in ROUNDS * rest:
            best = max(({**best, name: value} for value in values), key=rate_of)
        if record := record_of(best):
            found.append((record, best))
    return found


def _among_predicted(
    space: Space, ranked: Sequence[Chosen], measure: Measure, predict: Predict
) -> tuple[Chosen, list[tuple[str, Any]]]:
    """Returns the fastest of the baseline and the ranked ones, with those values that cannot be
    predicted and make it faster, and all values that cannot be predicted.
    """
    what = "the baseline and the steps predicted to be fastest"
    winner = _fastest(space, [space.defaults, *ranked], measure, what)
    unpredicted = _unpredicted(space, winner, predict)
    for name, value in unpredicted:
        what = f"the fastest step with {name} {value}, which cannot be predicted"
        winner = _fastest(space, [winner, {**winner, name: value}], measure, what)
    return winner, unpredicted


def _unpredicted(space: Space, winner: Chosen, predict: Predict) -> list[tuple[str, Any]]:
    """Returns values with which the winner would be possible, but could not be predicted."""
    unpredicted = []
    for name, values in space.choices.items():
        for value in values:
            spec = space.spec({**winner, name: value})
            if spec is not None and predict(spec) is None:
                unpredicted.append((name, value))
    return unpredicted


def _fastest(space: Space, tried: Sequence[Chosen], measure: Measure, what: str) -> Chosen:
    possible = [chosen for chosen in tried if space.spec(chosen) is not None]
    records = measure([space.spec(chosen) for chosen in possible], what)
    fastest = max(range(len(possible)), key=lambda index: rate(records[index]))
    return possible[fastest]


def _one_at_a_time(space: Space, measure: Measure) -> Chosen:
    chosen: Chosen = space.defaults
    for name, values in space.choices.items():
        tried = [{**chosen, name: value} for value in values]
        chosen = _fastest(space, tried, measure, f"the values of {name}")
    return chosen


def _gains(space: Space, winner: Chosen, measure: Measure) -> list[Gain]:
    """Compares the winner with itself without each choice that differs from the default."""
    changed = [name for name, value in winner.items() if value != space.defaults[name]]
    without = {name: space.spec({**winner, name: space.defaults[name]}) for name in changed}
    possible = {name: spec for name, spec in without.items() if spec is not None}
    fastest, *others = measure(
        [space.spec(winner), *possible.values()], "the fastest step without each of its choices"
    )
    records = dict(zip(possible, others, strict=True))
    gains = []
    for name in changed:
        record = records.get(name)
        slower = rate(record) if record else 0.0
        ratio = rate(fastest) / slower if slower else None
        disturbed = is_disturbed(fastest) or (record is not None and is_disturbed(record))
        gains.append(Gain(name, winner[name], space.defaults[name], ratio, disturbed))
    return sorted(gains, key=lambda gain: -(gain.ratio or math.inf))
