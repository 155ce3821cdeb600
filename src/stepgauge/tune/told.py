"""The winner as a table of gains, a command line and a configuration file."""

import json
from pathlib import Path
from typing import Any

from stepgauge.report.findings import COMMANDS, command
from stepgauge.report.names import describe
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import options_of, written
from stepgauge.tune.choices import Space
from stepgauge.tune.search import Tuned, rate


def gain_table(tuned: Tuned) -> Table:
    """Each choice that is not usual, and how many times as fast it makes the winner."""
    rows = [[gain.choice, gain.value, gain.usual, gain.ratio] for gain in tuned.gains]
    return Table(
        ["choice", "value", "instead of", "times as fast"],
        rows,
        numeric=frozenset(["times as fast"]),
        caption="What each choice gains: the winner beside itself without it.",
        formats={"times as fast": ".2f"},
    )


def sentence(tuned: Tuned) -> str:
    """The winner beside the usual step, and how it was found."""
    unit = "tokens/s" if "tokens_per_s" in tuned.winner.metrics else "steps/s"
    times = f", {tuned.speedup:.2f} times the usual step's" if tuned.speedup else ""
    how = (
        f"{tuned.predicted} of {tuned.candidates} candidates were predicted, and the best measured"
        if tuned.predicted
        else f"none of {tuned.candidates} candidates could be predicted: one choice after the other "
        "was measured"
    )
    return f"{number(rate(tuned.winner))} {unit}{times} ({describe(tuned.winner)}). {how[0].upper()}{how[1:]}."


def command_line(tuned: Tuned) -> str:
    return command(tuned.winner)


def write_config(tuned: Tuned, space: Space, path: Path) -> None:
    """The winner's options as a file that --config reads, under its command's name."""
    spec: dict[str, Any] = {**tuned.winner.spec, **tuned.winner.spec["model"]}
    known = options_of(space.kind, ModelSpec)
    lines = [f"# {sentence(tuned)}", f"[{COMMANDS[tuned.winner.kind].replace(' ', '.')}]"]
    for name, values in space.values.items():
        field = known[name]
        # of a user's network and a config.json the record has what they contain
        value = values[0] if name in ("model", "hf_config") else spec.get(name, values[0])
        text = written(field, value)
        flag = (field.metadata["flag"] or name).replace("_", "-")
        lines.append(f"{flag} = {json.dumps(text) if isinstance(value, str) else text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
