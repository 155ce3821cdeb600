"""How many rows are done, and how long the others take."""

import contextlib
import dataclasses
import io

import pytest
from rich.console import Console
from rich.text import Text

from stepgauge.bench.sweep import DISTURBED, Job, JobResult
from stepgauge.cli import console, row_progress
from stepgauge.cli.pace import Pace
from stepgauge.cli.row_name import fitted, telling_places
from stepgauge.cli.row_progress import RowProgress
from stepgauge.cli.rows import names_by_identity
from stepgauge.report.names import labels
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec

JOBS = [
    Job(lambda spec: None, StepSpec(model=ModelSpec.preset("nano"), size="nano", batch=batch))
    for batch in (1, 2, 4)
]


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_the_others_take_as_long_as_the_mean_of_those_that_are_done(clock):
    pace = Pace(5, "rows", clock)
    pace.skip(1)  # an earlier run measured it
    pace.begin()
    clock.seconds += 40.0
    assert pace.seconds_left() is None and pace.sentence() == ""
    pace.begin()  # ends the one before
    assert (pace.done, pace.seconds_left()) == (2, 120.0)
    clock.seconds += 15.0
    assert pace.seconds_left() == 105.0
    clock.seconds += 45.0  # longer than the mean: the two after it still take as long
    assert pace.seconds_left() == 80.0
    pace.end()
    clock.seconds += 1000.0  # no row runs
    assert pace.seconds_left() == 2 * (40.0 + 60.0) / 2
    assert pace.sentence() == "3 of 5 rows done; about 100 s left for the rest"


@dataclasses.dataclass
class Shown:
    """Rows in a terminal of 100 columns or in a file, and what they wrote."""

    file: io.StringIO
    rows: RowProgress
    bar: object

    def text(self):
        self.bar.refresh()
        return Text.from_ansi(self.file.getvalue()).plain


@pytest.fixture
def show(monkeypatch, clock):
    @contextlib.contextmanager
    def make(*, terminal, pace, name="row", width=100, probes=()):
        shown = io.StringIO()
        output = Console(file=shown, force_terminal=terminal, width=width, highlight=False)
        monkeypatch.setattr(console, "error_console", output)
        monkeypatch.setattr(row_progress, "PACE_EVERY_S", 0.0)
        names = {job.pending.identity: f"{name} {number}" for number, job in enumerate(JOBS)}
        with console.progress(pace.total, pace.noun) as (bar, task):
            bar.update(task, pace=pace)
            yield Shown(shown, RowProgress(names, pace, bar, task, probes), bar)

    return make


def test_a_bar_has_the_time_left_from_the_first_row_on(show, clock):
    with show(terminal=True, pace=Pace(3, "rows", clock)) as shown:
        shown.rows.start(JOBS[0], "")
        assert "0/3 rows, -:--:-- left" in shown.text()
        clock.seconds = 60.0
        shown.rows.finish(JobResult(JOBS[0], JOBS[0].pending, is_reused=False))
        assert "1/3 rows, 0:02:00 left" in shown.text()


def test_rows_that_were_measured_before_tell_nothing_of_the_time(show, clock):
    with show(terminal=True, pace=Pace(3, "rows", clock)) as shown:
        shown.rows.reuse(JOBS[1:])
        shown.rows.start(JOBS[0], "")
        assert "2/3 rows, -:--:-- left" in shown.text()


def test_rows_that_were_measured_before_take_no_time_although_their_turn_is_later(show, clock):
    with show(terminal=True, pace=Pace(3, "rows", clock)) as shown:
        shown.rows.reuse(JOBS[1:2])
        shown.rows.start(JOBS[0], "")
        clock.seconds = 60.0
        shown.rows.finish(JobResult(JOBS[0], JOBS[0].pending, is_reused=False))
        assert "2/3 rows, 0:01:00 left" in shown.text()
        shown.rows.finish(JobResult(JOBS[1], JOBS[1].pending, is_reused=True))
        shown.rows.start(JOBS[2], "")
        assert "2/3 rows, 0:01:00 left" in shown.text()


def test_a_probe_counts_with_the_row_for_which_it_is_measured(show, clock):
    """`validate --now` times the host before each row, which takes another time than the row."""
    probe, row, last = JOBS
    probes = {probe.pending.identity}
    with show(terminal=True, pace=Pace(2, "rows", clock), probes=probes) as shown:
        for job in (probe, row):
            shown.rows.start(job, "")
            clock.seconds += 15.0
            assert "0/2 rows, -:--:-- left" in shown.text()
            shown.rows.finish(JobResult(job, job.pending, is_reused=False))
        assert "1/2 rows, 0:00:30 left" in shown.text()
    with show(terminal=True, pace=Pace(2, "rows", clock), probes=probes) as shown:
        shown.rows.reuse([row])  # but the probe failed
        shown.rows.start(probe, "")
        shown.rows.finish(JobResult(probe, probe.pending, is_reused=False))
        shown.rows.finish(JobResult(row, row.pending, is_reused=True))
        shown.rows.start(last, "")
        assert "1/2 rows, -:--:-- left" in shown.text()


def test_in_a_file_a_line_has_the_measurements_of_all_turns(show, clock):
    with show(terminal=False, pace=Pace(6, "measurements", clock)) as shown:
        for turn, jobs in enumerate((JOBS, JOBS[::-1])):
            for job in jobs:
                shown.rows.start(job, f"turn {turn + 1} of 2" if turn else "")
                shown.rows.start(job, DISTURBED)  # no further measurement
                clock.seconds += 200.0
    lines = [line for line in shown.text().splitlines() if " left" in line]
    assert len(lines) == 5
    assert lines[0] == "1 of 6 measurements done; about 17 minutes left for the rest"
    assert lines[-1] == "5 of 6 measurements done; about 3 minutes left for the rest"


def test_a_terminal_that_cannot_redraw_has_lines_instead_of_a_bar(show, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with show(terminal=True, pace=Pace(3, "rows", clock)) as shown:
        for job in JOBS:
            shown.rows.start(job, "")
            clock.seconds += 30.0
    assert "3 rows; each prints a line" in shown.text()
    assert "2 of 3 rows done; about 30 s left for the rest" in shown.text()


def test_lines_on_the_time_left_are_few(show, clock, monkeypatch):
    with show(terminal=False, pace=Pace(3, "rows", clock)) as shown:
        monkeypatch.setattr(row_progress, "PACE_EVERY_S", 3600.0)
        for job in JOBS:
            shown.rows.start(job, "")
    assert " left" not in shown.text() and "3 rows; each prints a line" in shown.text()


@pytest.mark.parametrize("width", [60, 80])
def test_a_bar_shows_the_part_of_a_long_name_that_tells_the_row_from_others(show, clock, width):
    name = "layout=pp2 1f1b m2 dp2 zero1 precision=bf16 batch"
    with show(terminal=True, pace=Pace(3, "rows", clock), name=name, width=width) as shown:
        for number, job in enumerate(JOBS):
            shown.rows.start(job, "")
            shown.rows.update("warming up")
            assert f" {number}" in shown.text().splitlines()[-1].partition("/3 rows")[0][:-12]


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (40, "size=nano precision=bf16 batch=8: timing"),
        (35, "size=nano precision=bf16 batch=8: …"),
        (20, "…sion=bf16 batch=8:…"),
    ],
)
def test_a_long_name_is_cut_where_it_tells_nothing(width, text):
    name, other = "size=nano precision=bf16 batch=8", "size=nano precision=bf16 batch=16"
    place = telling_places([name, other, "size=nano precision=fp32 batch=8"])[name]
    assert name[place:] == "batch=8"
    assert fitted(f"{name}: timing", place, width) == text
    assert telling_places(["the only row"]) == {"the only row": 0}


def test_names_of_rows_say_that_they_are_measured_only_where_nothing_else_tells_two_apart():
    def pending(size, provenance):
        spec = StepSpec(model=ModelSpec.preset(size), size=size, device="cpu")
        return Record(kind="step", spec=dataclasses.asdict(spec), provenance=provenance)

    apart = [pending("nano", "measured"), pending("tiny", "modelled")]
    assert list(names_by_identity(apart, labels).values()) == ["size=nano", "size=tiny"]
    alike = [pending("nano", "measured"), pending("nano", "modelled")]
    assert list(names_by_identity(alike, labels).values()) == ["measured", "modelled"]
