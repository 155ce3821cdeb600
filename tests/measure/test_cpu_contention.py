"""Cores used by other processes, computed from given readings."""

import os

import pytest

from stepgauge.measure import cpu_contention
from stepgauge.measure.cpu_contention import Reading, missed_cores, reading


def span(*, wall, busy, own, cores):
    return Reading(10.0, 100.0, 1.0, cores), Reading(10.0 + wall, 100.0 + busy, 1.0 + own, cores)


@pytest.mark.parametrize(
    ("readings", "threads", "missed"),
    [
        (span(wall=10.0, busy=20.0, own=20.0, cores=2), 2, 0.0),  # no other work
        (span(wall=10.0, busy=20.0, own=11.0, cores=2), 2, 0.9),  # one needed core is used
        (span(wall=10.0, busy=20.0, own=10.0, cores=2), 1, 0.0),  # the other core suffices
        (span(wall=10.0, busy=50.0, own=40.0, cores=8), 4, 0.0),  # enough cores are free
        (span(wall=10.0, busy=80.0, own=20.0, cores=8), 4, 2.0),  # others use 6 of 8; it needs 4
        (span(wall=0.01, busy=0.02, own=0.0, cores=2), 2, 0.0),  # too short to know
    ],
)
def test_needed_cores_that_other_processes_used(readings, threads, missed):
    assert missed_cores([readings], threads) == pytest.approx(missed, abs=0.05)


def test_ranks_of_one_measurement_do_not_count_as_other_processes():
    ranks = [span(wall=10.0, busy=20.0, own=own, cores=2) for own in (9.9, 10.0)]
    assert missed_cores(ranks, 1) < 0.05
    assert missed_cores(ranks[:1], 2) > 0.9  # a single process would see the other rank


def test_ranks_on_several_machines_count_by_machine():
    quiet, busy = (span(wall=10.0, busy=busy, own=10.0, cores=2) for busy in (10.0, 20.0))
    ranks = [[r._replace(host=host) for r in own] for host, own in (("a", quiet), ("b", busy))]
    assert missed_cores(ranks, 2) == pytest.approx(1.0, abs=0.05)


def test_only_cores_that_this_process_may_use_are_read(tmp_path, monkeypatch):
    """Idle and iowait are not busy. Guest time is already contained in user time."""
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", "cpu0 100 10 20 999 999 3 2 1 77 0",
             "cpu1 900 0 0 0 0 0 0 0 0 0", "intr 5"]  # fmt: skip
    monkeypatch.setattr(cpu_contention, "STAT", tmp_path / "stat")
    assert reading() is None
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    result = reading()
    assert (result.busy_s, result.cores) == (pytest.approx(1.36), 1)
