"""Presents the winner: a table of gains, a command line and a configuration file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepgauge.report.names import describe
from stepgauge.report.numbers import Doubtful, number
from stepgauge.report.table import Table
from stepgauge.spec import options
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.kinds import COMMANDS
from stepgauge.spec.model import SIZES, ModelSpec
from stepgauge.spec.options import SHAPE, Field, flag_of, options_of, written
from stepgauge.spec.record import Record
from stepgauge.spec.turns import turns_together
from stepgauge.tune.choices import Space
from stepgauge.tune.search import Gain, Tuned, rate


def gain_table(tuned: Tuned) -> Table:
    """Returns each choice that differs from the default, and its speedup."""
    apart = ", measured one after the other" if len(tuned.gains) > 1 else ""
    rows = [[gain.choice, gain.value, gain.default, _ratio(gain)] for gain in tuned.gains]
    return Table(
        ["choice", "value", "instead of", "times as fast"],
        rows,
        numeric=frozenset(["times as fast"]),
        caption=f"Speedup by each choice: the winner compared with itself without it{apart}.",
        formats={"times as fast": ".2f"},
    )


def _ratio(gain: Gain) -> float | None:
    return Doubtful(gain.ratio) if gain.ratio is not None and gain.disturbed else gain.ratio


def sentence(tuned: Tuned) -> str:
    """Returns the winner's speed, its speedup over the baseline, and how it was found.

    The speedup is called unconfirmed if one of the two rows was disturbed.
    """
    unit = "tokens/s" if "tokens_per_s" in tuned.winner.metrics else "steps/s"
    speed, name = f"{number(rate(tuned.winner))} {unit}", describe(tuned.winner)
    if tuned.candidates == 1:
        return f"{speed} ({name}). There was nothing to choose: every option has one value."
    if tuned.predicted:
        how = (
            f"{tuned.predicted} of {tuned.candidates} candidates were predicted, and the best of them "
            "were measured"
        )
        if tuned.measured_only:
            values = ", ".join(f"{name} {value}" for name, value in tuned.measured_only)
            how += f"; without a prediction: {values}, measured on the fastest"
    else:
        how = (
            f"None of {tuned.candidates} candidates could be predicted, so that one choice after the "
            "other was measured"
        )
    if tuned.overtaken:
        return f"{speed} ({name}). {_overtaken(tuned.overtaken, tuned.default, unit)}. {how}."
    if tuned.winner.key == tuned.default.key:
        return f"{speed} ({name}). Nothing that was measured is faster than the baseline. {how}."
    if doubt := _doubt(tuned):
        return f"{speed} ({name}). {doubt}. {how}."
    return f"{speed}{_times(tuned)} ({name}). {how}."


def _overtaken(step: Record, baseline: Record, unit: str) -> str:
    """Returns how the fastest step of the search lost to the baseline, and what to do about it."""
    lost = (
        f"This is the baseline. The search found a faster step ({describe(step)}), which was slower when "
        f"both were measured again, alternating: {number(rate(step))} {unit}"
    )
    if is_disturbed(step) or is_disturbed(baseline):
        lost += "; other work disturbed these rows: run it again with --fresh on a quiet machine"
    return lost


def _times(tuned: Tuned) -> str:
    """Returns ", 2.85 times the baseline's, in 3 turns"; "" if the baseline did not run."""
    turns = turns_together([tuned.default, tuned.winner])
    in_turns = f", in {turns} turns" if turns > 1 else ""
    return f", {tuned.speedup:.2f} times the baseline's{in_turns}" if tuned.speedup else ""


def _doubt(tuned: Tuned) -> str:
    """Returns why no gain is confirmed; "" if neither of the two rows was disturbed."""
    rows = {"the baseline": tuned.default, "this step": tuned.winner}
    disturbed = [name for name, row in rows.items() if is_disturbed(row)]
    if not disturbed:
        return ""
    were = "was" if len(disturbed) == 1 else "were"
    measured = f" (measured: {_times(tuned).removeprefix(', ')})" if tuned.speedup else ""
    return (
        f"No gain is confirmed{measured}: {' and '.join(disturbed)} {were} disturbed; run it again with "
        f"--fresh on a quiet machine"
    )


def command_line(tuned: Tuned, space: Space) -> str:
    """Returns the command that measures the winner, without options that have their default."""
    changed = (
        (field, value)
        for field, value in _options(tuned, space)
        if value != field.default or field.name in ("size", "device", *SHAPE)
    )
    return options.command_line(COMMANDS[tuned.winner.kind], changed)


def write_config(tuned: Tuned, space: Space, path: Path) -> None:
    """Writes the winner's options to a file that --config reads."""
    lines = [f"# {sentence(tuned)}", f"[{COMMANDS[tuned.winner.kind].replace(' ', '.')}]"]
    for field, value in _options(tuned, space):
        text = written(field, value)
        lines.append(f"{flag_of(field)} = {json.dumps(text) if isinstance(value, str) else text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _options(tuned: Tuned, space: Space) -> Iterator[tuple[Field, Any]]:
    """Yields each option that was given or chosen, with the winner's value."""
    spec: dict[str, Any] = {**tuned.winner.spec, **tuned.winner.spec["model"]}
    known = options_of(space.kind, ModelSpec)
    values_of = dict(space.values)
    if "size" in values_of and spec["size"] not in SIZES:  # a changed preset
        del values_of["size"]
        values_of |= {name: (spec[name],) for name in SHAPE}
    for name, values in values_of.items():
        # the record has the contents of these files, not their names
        is_file = name in ("model", "hf_config")
        yield known[name], values[0] if is_file else spec.get(name, values[0])
