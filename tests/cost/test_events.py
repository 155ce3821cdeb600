"""Streams as events, against timelines computed by hand; and what a wrapper adds, from its plan."""

import math

import pytest

from stepgauge.cost.contention import NoContention, Slowdown
from stepgauge.cost.events import COMPUTE, HOST, Ran, StreamWork, alone_us, busy, simulate


class Fixed:
    """Every kernel takes 2 times as long beside a collective, which takes 1.5 times."""

    def of(self, operation, collective, axis):
        return Slowdown(2.0, 1.5, "assumed")


def ends(works, contention=None):
    return [round(ran.end, 6) for ran in simulate(works, contention or NoContention())]


def test_streams_run_in_order_and_wait_for_what_they_read():
    works = [
        StreamWork("host", HOST, 4.0),
        StreamWork("first", COMPUTE, 10.0, "matmul", (0,)),
        StreamWork("bucket", "data", 5.0, "all_reduce", (1,)),
        StreamWork("second", COMPUTE, 10.0, "matmul"),
        StreamWork("late", "data", 30.0, "all_reduce", (3,)),
        StreamWork("update", COMPUTE, 1.0, "traffic", (2, 4)),
    ]
    assert ends(works) == [4, 14, 19, 24, 54, 55]
    ran = simulate(works, NoContention())
    assert busy(ran, COMPUTE) == [(4, 24), (54, 55)]
    assert math.isclose(alone_us(ran, "data"), 30.0)


def test_contention_is_a_rate_over_what_overlaps():
    """A collective of 6 us beside computing of 10 takes 9, in which 4.5 us of it are done."""
    works = [
        StreamWork("kernel", COMPUTE, 10.0, "matmul"),
        StreamWork("bucket", "data", 6.0, "all_reduce"),
    ]
    assert ends(works, Fixed()) == [14.5, 9.0]
    # the kernel ends first: 4 us beside, then the collective's rest alone
    works = [
        StreamWork("kernel", COMPUTE, 2.0, "matmul"),
        StreamWork("bucket", "data", 6.0, "all_reduce"),
    ]
    assert ends(works, Fixed()) == [4.0, pytest.approx(4.0 + 6.0 - 4.0 / 1.5)]


def test_what_is_exposed_is_what_runs_beside_no_computing():
    spans = [("data", 0, 4), ("data", 6, 9), ("data", 12, 20), (COMPUTE, 1, 3), (COMPUTE, 2, 7)]
    spans += [(COMPUTE, 8, 15), (COMPUTE, 19, 25)]
    ran = [Ran(StreamWork(stream, stream, 0.0), start, end) for stream, start, end in spans]
    # 1 before computing; 1 between; 4 of the last between two computations
    assert alone_us(ran, "data") == 1 + 1 + 4


def test_a_circle_is_named():
    works = [StreamWork("a", COMPUTE, 1.0, after=(1,)), StreamWork("b", "data", 1.0, after=(0,))]
    with pytest.raises(ValueError, match="a waits for what never ends"):
        simulate(works, NoContention())
