"""The winner as a table of gains, a command line and a configuration file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepgauge.report.findings import COMMANDS
from stepgauge.report.names import describe
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec import options
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import SHAPE, Field, flag_of, options_of, written
from stepgauge.spec.turns import turns_together
from stepgauge.tune.choices import Space
from stepgauge.tune.search import Tuned, rate


def gain_table(tuned: Tuned) -> Table:
    """Each choice that is not usual, and how many times as fast it makes the winner."""
    apart = ", measured apart" if len(tuned.gains) > 1 else ""
    rows = [[gain.choice, gain.value, gain.usual, gain.ratio] for gain in tuned.gains]
    return Table(
        ["choice", "value", "instead of", "times as fast"],
        rows,
        numeric=frozenset(["times as fast"]),
        caption=f"What each choice gains: the winner beside itself without it{apart}.",
        formats={"times as fast": ".2f"},
    )


def sentence(tuned: Tuned) -> str:
    """The winner beside the usual step, and how it was found."""
    unit = "tokens/s" if "tokens_per_s" in tuned.winner.metrics else "steps/s"
    turns = turns_together([tuned.usual, tuned.winner])
    how_sure = f", in {turns} turns" if turns > 1 else ""
    times = f", {tuned.speedup:.2f} times the usual step's{how_sure}" if tuned.speedup else ""
    also = ", ".join(f"{name} {value}" for name, value in tuned.measured_only)
    how = (
        f"{tuned.predicted} of {tuned.candidates} candidates were predicted, and the best measured"
        + (f"; without a prediction: {also}, measured on the fastest" if also else "")
        if tuned.predicted
        else f"none of {tuned.candidates} candidates could be predicted: one choice after the other "
        "was measured"
    )
    return f"{number(rate(tuned.winner))} {unit}{times} ({describe(tuned.winner)}). {how[0].upper()}{how[1:]}."


def command_line(tuned: Tuned, space: Space) -> str:
    """The command that measures the winner as it was measured, without what is usual there."""
    told = (
        (field, value)
        for field, value in _options(tuned, space)
        if value != field.default or field.name in ("size", "device", *SHAPE)
    )
    return options.command_line(COMMANDS[tuned.winner.kind], told)


def write_config(tuned: Tuned, space: Space, path: Path) -> None:
    """The winner's options as a file that --config reads, under its command's name."""
    lines = [f"# {sentence(tuned)}", f"[{COMMANDS[tuned.winner.kind].replace(' ', '.')}]"]
    for field, value in _options(tuned, space):
        text = written(field, value)
        lines.append(f"{flag_of(field)} = {json.dumps(text) if isinstance(value, str) else text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _options(tuned: Tuned, space: Space) -> Iterator[tuple[Field, Any]]:
    """The winner's value of each option that was given or chosen."""
    spec: dict[str, Any] = {**tuned.winner.spec, **tuned.winner.spec["model"]}
    known = options_of(space.kind, ModelSpec)
    asked = dict(space.values)
    if "size" in asked and spec["size"] not in ModelSpec.preset_names():  # another shape than its
        del asked["size"]
        asked |= {name: (spec[name],) for name in SHAPE}
    for name, values in asked.items():
        # of a user's network and a config.json the record has what they contain
        is_file = name in ("model", "hf_config")
        yield known[name], values[0] if is_file else spec.get(name, values[0])
