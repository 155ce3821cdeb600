"""All commands in the README and the guides are valid, and all links lead to files."""

import json
import re
import shlex
from pathlib import Path

import pytest

from stepgauge import cli
from stepgauge.cli import rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def commands(text):
    """Yields the arguments of each stepgauge command, up to a pipe or redirection."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if shown := re.match(r"\$ (?:\S+/)?stepgauge (.*)", line):
                words = shlex.split(shown[1], comments=True)
                ends = [place for place, word in enumerate(words) if word in ("|", ">", "&&")]
                yield [word for word in words[: min(ends, default=None)] if word[0] != "$"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_take_the_options_that_are_shown(path, monkeypatch):
    monkeypatch.setattr(rows, "file_named", Path)  # files that only the reader has
    for words in commands(path.read_text("utf-8")):
        given, cli.app.config = cli._read_config(words)
        cli.app.parse_args(given, exit_on_error=False, print_error=False)


def test_commands_are_found():
    found = [each for path in DOCUMENTS for each in commands(path.read_text("utf-8"))]
    assert len(found) > 40 and ["study"] in found


def test_the_hardware_file_of_the_guide_to_plan_is_read_and_predicts(stepgauge, tmp_path):
    (text,) = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs" / "plan.md").read_text("utf-8"), re.DOTALL
    )
    path = tmp_path / "described.json"
    path.write_text(text)
    assert "peaks" in json.loads(text) and "fabric" in json.loads(text)
    asked = ("--size", "nano", "--context", "128", "--precision", "bf16", "--hardware", path)
    status, out, err = stepgauge("predict", *asked, "--batch", "16", "--layout", "dp16 zero1")
    assert status == 0, err
    assert "MFU" in out
    status, out, err = stepgauge("plan", *asked, "--gpus", "2", "--global-batch", "2", "--top", "1")
    assert status == 0 and "scaled by the ratio of published peaks (NVIDIA" in out, err


def test_links_within_the_repository_lead_to_files():
    linked = [
        (path, link)
        for path in [*DOCUMENTS, *(ROOT / "docs" / "log").glob("*.md")]
        for link in re.findall(r"\]\(([^)#\s]+)", CODE.sub("", path.read_text("utf-8")))
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(linked) > 100
    dead = [f"{path.name}: {link}" for path, link in linked if not (path.parent / link).exists()]
    assert not dead
