"""What others took of the cores, from readings that are given."""

import os

import pytest

from stepgauge.measure import cpu_contention
from stepgauge.measure.cpu_contention import Reading, missed_cores, reading


def span(*, wall, busy, own, cores):
    return Reading(10.0, 100.0, 1.0, cores), Reading(10.0 + wall, 100.0 + busy, 1.0 + own, cores)


@pytest.mark.parametrize(
    ("given", "threads", "missed"),
    [
        (span(wall=10.0, busy=20.0, own=20.0, cores=2), 2, 0.0),  # the machine is its own
        (span(wall=10.0, busy=20.0, own=11.0, cores=2), 2, 0.9),  # one core is taken
        (span(wall=10.0, busy=20.0, own=10.0, cores=2), 1, 0.0),  # and it needs the other alone
        (span(wall=10.0, busy=50.0, own=40.0, cores=8), 4, 0.0),  # there are more
        (span(wall=10.0, busy=80.0, own=20.0, cores=8), 4, 2.0),  # six of eight, four are needed
        (span(wall=0.01, busy=0.02, own=0.0, cores=2), 2, 0.0),  # two ticks say nothing
    ],
)
def test_cores_that_a_measurement_needed_and_others_had(given, threads, missed):
    assert missed_cores([given], threads) == pytest.approx(missed, abs=0.05)


def test_what_ranks_take_is_not_others():
    ranks = [span(wall=10.0, busy=20.0, own=own, cores=2) for own in (9.9, 10.0)]
    assert missed_cores(ranks, 1) < 0.05
    assert missed_cores(ranks[:1], 2) > 0.9  # one of them alone had the other beside it


def test_the_cores_that_this_process_may_use_are_read(tmp_path, monkeypatch):
    """Idle and waiting for a disk is not busy; a guest's time is in the user's."""
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", "cpu0 100 10 20 999 999 3 2 1 77 0",
             "cpu1 900 0 0 0 0 0 0 0 0 0", "intr 5"]  # fmt: skip
    monkeypatch.setattr(cpu_contention, "STAT", tmp_path / "stat")
    assert reading() is None
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    found = reading()
    assert (found.busy_s, found.cores) == (pytest.approx(1.36), 1)
