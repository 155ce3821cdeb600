"""Tests that messages of the command line tell a user what to do next."""

import pytest

from stepgauge import cli
from stepgauge.cli import tune
from stepgauge.cli.rows import TerminatedError
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore


def refused(capfd, *arguments):
    """Returns the message of a command that must be refused as a usage error."""
    assert cli.run(list(arguments)) == 2
    return capfd.readouterr().err


def test_an_interrupted_tune_counts_the_rows_of_all_its_phases(tmp_path):
    store = RunStore(tmp_path)
    for batch in (1, 2):
        record = Record(kind="step", spec={"batch": batch}, metrics={}, status="ok")
        store.append(record)
    with (
        pytest.raises(TerminatedError, match=r"2 rows are in .*; rerun"),
        tune.saved_rows(tmp_path),
    ):
        raise TerminatedError("no row has been measured yet")
    with pytest.raises(TerminatedError, match=r"^no row"), tune.saved_rows(tmp_path / "empty"):
        raise TerminatedError("no row has been measured yet")


def test_tune_names_only_the_wrong_count(capfd):
    message = refused(capfd, "tune", "--best", "0", "--device", "cpu")
    assert "--best is 0; it must be at least 1" in message and "ranks" not in message
