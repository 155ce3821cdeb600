"""What cost/pipeline/repeated.py derives from a simulated pass, worked out by hand."""

import pytest

from stepgauge.cost.pipeline.repeated import Pass
from stepgauge.cost.pipeline.timeline import Durations, Span, Timeline
from stepgauge.spec.plan.pipeline.action import FORWARD, Action


def test_a_passs_busy_share_is_that_of_the_busiest_rank():
    """One rank computes for 90 of 120 ms, the other for 40: products run at the pace of the first."""
    rows = [(0, 0.0, 90.0)], [(1, 80.0, 120.0)]
    timeline = Timeline(
        tuple(tuple(Span(Action(s, FORWARD), start, end) for s, start, end in row) for row in rows)
    )
    found = Pass.of(timeline, Durations(actions={}))
    assert found.busy == pytest.approx(90 / 120)
    assert found.waiting_ms == pytest.approx(120 - 40)
