"""The pipeline simulator against what can be derived: bubbles, waiting for a slow stage, transfers,
a host that is too slow.
"""

import pytest

from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.spec.plan.pipeline import ScheduleError, build, check, from_text, lower


def run(name, ranks, micro_batches, **durations):
    schedule = lower(build(name, ranks=ranks, micro_batches=micro_batches))
    return simulate(schedule, Durations.of_stages(schedule.num_stages, **durations))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_bubbles_equal_those_derived_in_the_papers(p):
    """Idle units of rank 0 in a step of m micro-batches, if F, I and W each take one unit.

    GPipe and 1F1B (p - 1)(F + I + W); interleaved over v = 2 stages a v-th; ZB-H1
    (p - 1)(F + I - W), a third; interleaved zero bubble, ZBV and DualPipeV only the way down the
    pipe, (p - 1) F of half a stage.
    """
    m = 4 * p
    for name, stages, idle in (
        ("gpipe", 1, 3 * (p - 1)),
        ("1f1b", 1, 3 * (p - 1)),
        ("interleaved", 2, 3 * (p - 1)),
        ("zb-h1", 1, p - 1),
        ("izb", 2, p - 1),
        ("zbv", 2, p - 1),
        ("dualpipev", 2, p - 1),
    ):
        timeline = run(name, p, m)
        assert timeline.step_ms == 3 * stages * m + idle, name
        assert timeline.bubbles == pytest.approx([idle / timeline.step_ms] * p), name
        assert timeline.over_ideal == pytest.approx(1 + idle / (3 * stages * m)), name


@pytest.mark.parametrize("p", [4, 8])
def test_half_the_memory_still_has_a_shorter_bubble_than_1f1b(p):
    plain = run("1f1b", p, 4 * p).over_ideal
    assert run("v-half", p, 4 * p).over_ideal < plain
    assert run("v-min", p, 4 * p).over_ideal < plain


def test_all_ranks_wait_for_a_slow_stage():
    """m micro-batches of the slow stage, a forward of the stage before, two units in which its
    warm-up is over and the first backward not there, and the last backward of the stage before.
    """
    timeline = run("1f1b", 4, 8, weights=[1, 2, 1, 1])
    assert timeline.step_ms == 8 * 6 + 1 + 2 + 2
    assert min(timeline.bubbles) == timeline.bubbles[1] == pytest.approx(5 / 53)
    assert timeline.bubbles[0] == timeline.bubbles[3] == pytest.approx(1 - 24 / 53)


def test_a_transfer_is_hidden_if_its_receive_is_posted_early():
    """It is exposed on the first way down and the last way back only."""
    schedule = build("gpipe", ranks=2, micro_batches=8)
    durations = Durations.of_stages(2, transfer=0.5)
    for ahead in (0, 1):
        timeline = simulate(lower(schedule, ahead=ahead), durations)
        hidden = 24 + 3 + 2 * 0.5
        assert timeline.step_ms == (hidden if ahead else hidden + 14 * 0.5)
    (first, *_) = timeline.transfers
    assert (str(first.action), first.start, first.end) == ("0SEND_F0", 1.0, 1.5)


def test_a_slow_host_bounds_the_step():
    """The host issues all computations of a rank; the last one still has to run."""
    schedule = lower(build("1f1b", ranks=2, micro_batches=4))
    durations = Durations.of_stages(2, forward=0.01, input=0.01, weight=0.01, host_ms=1.0)
    timeline = simulate(schedule, durations)
    computations = 2 * 4  # F and B of four micro-batches
    assert computations <= timeline.step_ms < computations + 1
    without = Durations.of_stages(2, forward=0.01, input=0.01, weight=0.01, host_ms=0.0)
    assert simulate(schedule, without).step_ms < 1
    # A fast host costs nothing, because the GPU computes while the rest is issued.
    slow, none = (
        simulate(schedule, Durations.of_stages(2, host_ms=ms)).step_ms for ms in (0.5, 0.0)
    )
    assert slow == none


def test_invalid_schedules_and_durations_are_refused():
    with pytest.raises(ScheduleError, match="lower it first"):
        simulate(build("1f1b", ranks=2, micro_batches=2), Durations.of_stages(2))
    with pytest.raises(ValueError, match="no duration for F of stage 1"):
        simulate(lower(build("1f1b", ranks=2, micro_batches=2)), Durations.of_stages(1))
    with pytest.raises(ValueError, match="weights has 1 values; there are 2 stages"):
        Durations.of_stages(2, weights=[1.0])
    stuck = from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="waits for itself"):
        simulate(lower(stuck), Durations.of_stages(2))


def test_filled_bubbles_shorten_the_step_without_more_memory():
    """The head makes rank 0 of a V schedule the slowest; the other ranks have gaps for W."""
    for name, most in (("zbv", 1.13), ("v-half", 1.28)):
        schedule = build(name, ranks=4, micro_batches=8)
        durations = Durations.of_stages(8, transfer=0.03, weights=[1.0] * 7 + [1.3])
        filled = fill_bubbles(schedule, durations)
        before, after = check(schedule), check(filled)
        steps = [simulate(found.schedule, durations).over_ideal for found in (before, after)]
        assert steps[1] < steps[0] - 0.02
        assert steps[1] < most
        assert max(after.peak) <= max(before.peak)
        for row, again in zip(schedule.ranks, filled.ranks, strict=True):
            assert [a for a in row if a.kind != "W"] == [a for a in again if a.kind != "W"]
    plain = build("1f1b", ranks=2, micro_batches=2)
    assert fill_bubbles(plain, Durations.of_stages(2)) == plain
