"""Tests that messages of the command line tell a user what to do next."""

import re
from pathlib import Path

import pytest

from stepgauge import cli
from stepgauge.cli import tune
from stepgauge.cli.calibrate import _suggest
from stepgauge.cli.console import summary
from stepgauge.cli.rows import (
    RunFailedError,
    TerminatedError,
    require_single_success,
    require_success,
)
from stepgauge.runtime.fork_server import describe_exit
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record, Sample
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schedule", "check", "nosuch.txt"), "schedule is 'nosuch.txt'; there is no such file"),
        (("schedule", "check", "here/nosuch"), "schedule is 'here/nosuch'; there is no such file"),
        (("schedule", "check", "nosuch"), "schedule is 'nosuch'; choose one of gpipe"),
        (
            ("predict", "--hardware", "h100-sxm", "--layout", "dp2"),
            "its data sheet: dgx-a100, dgx-h100 or dgx-h200",
        ),
    ],
)
def test_the_message_names_what_to_do(capfd, arguments, message):
    assert message in refused(capfd, *arguments)


def test_predict_shows_how_far_a_step_may_be_off(capfd):
    assert cli.run(["predict", "--hardware", "dgx-h100", "--layout", "none"]) == 0
    heading = capfd.readouterr().out.splitlines()[1]
    assert heading.split()[:2] == ["step", "±"]


def test_a_plan_in_80_columns_keeps_its_results(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--size", "10b", "--gpus", "8", "--hardware", "dgx-h100", "--tokens", "1T"]
    assert cli.run(["plan", *options, "--precision", "bf16", "--global-batch", "64"]) == 0
    text, progress = capfd.readouterr()
    screened, *later = progress.splitlines()
    assert f": {screened.removeprefix('screening ')}, " in text
    assert later == ["simulating 30 layouts", "finding exposed communication of 10 layouts"]
    assert re.match(r"10b, 12(,\d{3}){3} parameters, ", text)
    headings = text.split("#  layout")[0] + text.split("#  layout")[1].partition("\n")[0]
    assert all(word in headings for word in ("step", "±", "peak", "days", "MFU"))
    assert "bubbles" not in text.split("exposed in the simulated step")[1].partition("\n")[0]
    assert "1.37 times as long" in text
    memory = text.partition("Memory of the fullest rank")[2]
    assert "--format json has more: " in memory  # CSV has only the table of layouts


def test_the_line_of_a_profile_has_only_its_step_and_idle_time():
    names = ("step_ms", "forward_ms", "profiled_step_ms", "kind_matmul_ms", "idle_ms")
    metrics = {name: Sample.exact(1.0, "ms") for name in names}
    line = summary(Record(kind="profile", spec={}, metrics=metrics), "row")
    assert line == "row: step ms 1.000, profiled step ms 1.000, idle ms 1.000"


@pytest.mark.parametrize(("count", "words"), [(1, "1 shape"), (2, "2 shapes")])
def test_the_line_of_a_calibrated_operation_counts_its_shapes(count, words):
    metrics = {"shapes": Sample.exact(count, "")}
    assert summary(Record(kind="calibrate", spec={}, metrics=metrics), "row") == f"row: {words}"


def test_an_unknown_size_lists_bert_where_it_works(capfd):
    assert "bert-tiny" in refused(capfd, "bench", "layout", "--size", "nanoo", "--device", "cpu")


def test_the_help_of_validate_has_the_defaults_of_its_rows(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["validate", "--help"]) == 0
    text = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "stepgauge model prints their parameters --vocab-size" in text
    assert "auto for the fastest available [default: auto]" in text


def test_the_help_has_options_of_the_run_before_those_of_the_network(capfd):
    assert cli.run(["bench", "step", "--help"]) == 0
    text = capfd.readouterr().out
    assert text.index("--batch") < text.index("--vocab-size")
    assert "[default: 4]" in text


def test_a_grid_of_sizes_for_gpus_warns_on_a_cpu_before_the_first_row(capfd, monkeypatch):
    def measure(*arguments, **settings):
        raise ValueError("the first row starts here")

    monkeypatch.setattr("stepgauge.cli.rows.measure", measure)
    for name in KERNELS:
        message = refused(capfd, "bench", "kernel", name, "--grid", "anchors", "--device", "cpu")
        assert message.index("sizes for GPUs") < message.index("the first row starts here")
    assert "GPUs" not in refused(capfd, "bench", "kernel", "attention", "--device", "cpu")


def test_a_single_failed_row_prints_its_reason_once(capfd):
    row = Record(kind="step", spec={}, metrics={}, status="failed", note="no such module")
    with pytest.raises(RunFailedError, match="no such module"):
        require_single_success([row], "table")
    require_single_success([row], "json")
    with pytest.raises(RunFailedError, match=r"^2 of 2 rows failed$"):
        require_success([row, row])


def test_a_lost_fork_server_is_named():
    assert describe_exit(3) == "exited with 3"
    assert "fork server" in describe_exit(255)


def test_tune_names_only_the_wrong_count(capfd):
    message = refused(capfd, "tune", "--best", "0", "--device", "cpu")
    assert "--best is 0; it must be at least 1" in message and "ranks" not in message


@pytest.mark.parametrize(
    ("times_us", "words"),
    [
        ((5.0, 9.0), "to predict a step on this machine: stepgauge predict --size small"),
        (
            (5.0, 5.0),
            "no step can be predicted yet: 'traffic' of the hardware file mine gives no rate",
        ),
    ],
)
def test_a_calibration_suggests_predictions_only_if_its_file_has_a_rate(times_us, words, capsys):
    rows = tuple(zip((1e6, 4e6), times_us, strict=True))
    traffic = OperationTable(axes=("bytes",), rows=rows)
    _suggest(
        HardwareFile(name="mine", operations={"traffic": traffic}),
        Path("mine.json"),
        is_default=True,
    )
    assert capsys.readouterr().err.startswith(words)
