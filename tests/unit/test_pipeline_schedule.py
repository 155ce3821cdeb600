"""Pipeline schedules as data: published schedules, text and CSV, lowering, the checker."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules import random_schedule

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.spec.plan.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    build,
    check,
    from_csv,
    from_text,
    lower,
    to_csv,
    to_text,
)
from stepgauge.spec.plan.pipeline.balance import balance
from stepgauge.spec.plan.pipeline.check import Held
from stepgauge.spec.plan.pipeline.schedules import LOOPED
from stepgauge.spec.plan.pipeline.text import parse


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_published_schedule_can_run_and_survives_text_and_csv(name, ranks):
    for micro_batches in (2 * ranks, 3 * ranks, 4 * ranks):
        schedule = build(name, ranks=ranks, micro_batches=micro_batches)
        lowered = check(schedule).schedule
        assert lowered.compute == schedule
        simulate(lowered, Durations.of_stages(schedule.num_stages))
        for form in (schedule, lowered):
            assert from_text(to_text(form), name) == form
            assert from_csv(to_csv(form), name) == form


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in (*LOOPED, "dualpipev")])
def test_schedules_without_rounds_take_any_number_of_micro_batches(name):
    for ranks, micro_batches in itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 7, 16)):
        check(build(name, ranks=ranks, micro_batches=micro_batches))


def test_schedules_that_torch_has_too_are_the_same_as_torch_s():
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name, torch_name in {
        "interleaved": "ScheduleInterleaved1F1B",
        "izb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }.items():
        for ranks, micro_batches in ((2, 4), (3, 9), (4, 8), (4, 16)):
            made = object.__new__(getattr(torch_schedules, torch_name))  # __init__ needs a group
            made.pp_group_size, made._n_microbatches = ranks, micro_batches
            made.n_local_stages, made.num_stages, made._num_stages = 2, 2 * ranks, 2 * ranks
            made.number_of_rounds = max(1, micro_batches // ranks)
            made.microbatches_per_round = micro_batches // made.number_of_rounds
            rows = []
            for rank in range(ranks):
                made.rank = rank
                actions = made._calculate_single_rank_operations(rank)
                rows.append(",".join("" if action is None else str(action) for action in actions))
            built = build(name, ranks=ranks, micro_batches=micro_batches)
            assert from_csv("\n".join(rows), name) == built, (name, ranks, micro_batches)


def test_peak_activations_are_as_in_the_papers():
    """In micro-batches of a stage: 1F1B holds p - r on rank r; ZB-H1 and ZBV hold 1F1B's maximum on
    every rank; V-Half and V-Min hold a half and a third of that plus at most three.
    """
    for p in (4, 8):
        made = {
            name: check(build(name, ranks=p, micro_batches=4 * p))
            for name in ("gpipe", "1f1b", "zb-h1", "zbv", "v-half", "v-min")
        }
        assert made["gpipe"].peak == (4 * p,) * p
        assert made["1f1b"].peak == tuple(p - rank for rank in range(p))
        assert made["zb-h1"].peak == (p,) * p
        assert max(made["zbv"].peak) == 2 * p  # half stages
        assert max(made["v-half"].peak) <= 2 * p / 2 + 3
        assert max(made["v-min"].peak) <= 2 * p / 3 + 3


def test_memory_is_computed_in_any_unit_and_checked_against_a_bound():
    schedule = build("zb-h1", ranks=2, micro_batches=4)
    held = {stage: Held(activations=10.0, for_weights=4.0) for stage in range(2)}
    checked = check(schedule, held=held)
    # At its peak rank 1 has one micro-batch in flight and one with a pending W.
    assert checked.peak == (20.0, 14.0)
    assert (checked.in_flight, checked.saved) == ((2, 1), (1, 2))
    with pytest.raises(ScheduleError, match=r"rank 0 holds 20 at 0F1; the bound is 19") as refused:
        check(schedule, held=held, bound=19.0)
    assert refused.value.actions == (Action(0, "F", 1),)
    # Temporary memory counts only during its action: I of rank 1 runs while it holds 10 or 14.
    held[1] = Held(activations=10.0, for_weights=4.0, temporary={"I": 3.0})
    assert check(schedule, held=held).peak == (20.0, 17.0)


def test_receives_are_posted_the_given_number_of_computations_ahead():
    plain = build("1f1b", ranks=2, micro_batches=2)
    assert to_text(lower(plain, ahead=0)).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert to_text(lower(plain, ahead=1)).splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    with pytest.raises(ValueError, match="ahead is -1; it must be at least 0"):
        lower(plain, ahead=-1)
    sharded = lower(plain, sharded=[0]).ranks[0]
    assert [str(action) for action in (sharded[0], *sharded[-2:])] == [
        "0UNSHARD",
        "0REDUCE_GRAD",
        "0RESHARD",
    ]


def test_stage_work_that_a_lowered_schedule_lacks_is_added():
    """Without REDUCE_GRAD a stage's gradients would never be averaged over data ranks."""
    sends = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
    assert to_text(check(from_text(sends)).schedule).splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1REDUCE_GRAD 1SEND_B0",
    ]
    whole = lower(from_text(sends), sharded=[1])
    assert to_text(whole).splitlines()[1] == (
        "1RECV_F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 1SEND_B0"
    )
    assert lower(whole, sharded=[1]) == whole


def test_a_deadlock_is_reported_with_its_cycle():
    with pytest.raises(ScheduleError) as refused:
        check(from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    cycle = set(map(str, refused.value.actions))
    assert {"0F1", "0B0", "1F1", "1B0"} <= cycle, refused.value
    # These transfers would deadlock if both directions of the edge shared a communicator.
    crossed = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    crossed += "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    check(from_text(crossed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty"),
        ("0F0 0X0", "rank 0: action is '0X0'; it must be a stage, a kind and a micro-batch"),
        ("0F0 0B0\n1F0 1B", "rank 1: action is '1B'; B needs a micro-batch"),
        ("0F0 0UNSHARD1", "UNSHARD has no micro-batch"),
        ("0F0 0B0\n0F1 0B1", "stage 0 is on rank 0 (0F0) and on rank 1 (0F1)"),
        ("0F0 0B0 2F0 2B0", "1F0 is missing"),
        ("0F0 0F1 0B0", "0F1 has no backward 0B1"),
        ("0F0 0B0 0I0 0W0", "0B0 is a whole backward, so 0I0 must not be there"),
        ("0F0 0I0", "0I0 is in the schedule but 0W0 is missing"),
        ("0F0 0F0 0B0", "0F0 is in the schedule 2 times"),
        ("0B0 0F0", "rank 0 runs 0B0 before 0F0"),
        ("0F0 0W0 0I0", "rank 0 runs 0W0 before 0I0"),
        ("0SEND_F0", "rank 0 of 1 has nothing to compute"),
        ("0F0 0SEND_F0 0B0", "no rank needs 0SEND_F0 of rank 0"),
        ("0F0 0REDUCE_GRAD 0B0", "rank 0 runs 0REDUCE_GRAD before 0B0"),
        ("0F0 0I0 0REDUCE_GRAD 0W0", "rank 0 runs 0REDUCE_GRAD before 0W0"),
        ("0F0 0UNSHARD 0B0", "rank 0 runs 0F0 before 0UNSHARD"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "rank 0 runs 0RESHARD before 0B0"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD", "rank 0 runs 0RESHARD before 0REDUCE_GRAD"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_the_reason(text, message):
    with pytest.raises(ScheduleError) as refused:
        check(from_text(text))
    assert message in str(refused.value)


def test_build_refuses_unknown_names_and_unsupported_numbers():
    for arguments, message in (
        ({"name": "zbw", "ranks": 2, "micro_batches": 2}, "schedule is 'zbw'; choose one of"),
        ({"name": "1f1b", "ranks": 0, "micro_batches": 2}, "ranks is 0"),
        ({"name": "izb", "ranks": 2, "micro_batches": 5}, "must divide"),
        ({"name": "dualpipev", "ranks": 4, "micro_batches": 4}, "needs at least 8"),
        ({"name": "zbv", "ranks": 2, "micro_batches": 4, "per_rank": 3}, "2 stages per rank"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**arguments)
    with pytest.raises(ScheduleError, match="schedule is for 2 ranks; there are 3"):
        check(build("1f1b", ranks=2, micro_batches=2), ranks=3)


@st.composite
def valid_schedules(draw):
    ranks = draw(st.integers(1, 4))
    return random_schedule(
        draw(st.randoms(use_true_random=False)),
        ranks=ranks,
        stages=ranks * draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(valid_schedules(), st.integers(0, 3))
def test_any_valid_schedule_passes_the_check_and_the_simulation(schedule, ahead):
    lowered = check(lower(schedule, ahead=ahead)).schedule
    timeline = simulate(lowered, Durations.of_stages(schedule.num_stages, transfer=0.1))
    for row, spans in zip(schedule.ranks, timeline.ranks, strict=True):
        assert tuple(span.action for span in spans) == row
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))


@settings(max_examples=60, deadline=None)
@given(valid_schedules(), st.randoms(use_true_random=False))
def test_a_mutation_of_a_valid_schedule_is_refused(schedule, source):
    lowered = lower(schedule)
    for mutate in (drop, repeat, too_late, swap_sends):
        mutated = mutate(lowered, source)
        if mutated is not None:
            with pytest.raises(ScheduleError) as refused:
                check(mutated)
            assert refused.value.actions, mutate


def drop(schedule, source):
    """Removes an action that something needs."""
    return _without(schedule, source, lambda action: action.kind != "REDUCE_GRAD")


def repeat(schedule, source):
    """Adds a second copy of an action at the end of its rank."""
    rows = [list(row) for row in schedule.ranks]
    row = source.choice(rows)
    row.append(source.choice(row))
    return Schedule(tuple(map(tuple, rows)))


def too_late(schedule, source):
    """Moves a receive or a forward to the end of its rank."""
    late = ("F", "RECV_F", "RECV_B")
    return _without(schedule, source, lambda action: action.kind in late, at_end=True)


def swap_sends(schedule, source):
    """Moves the first of two sends on a channel behind the second."""
    for number, row in enumerate(schedule.ranks):
        for action in (action for action in row if action.kind.startswith("SEND")):
            later = [a for a in row[row.index(action) + 1 :] if a.kind == action.kind]
            for other in (other for other in later if other.stage == action.stage):
                moved = [a for a in row if a != action]
                moved.insert(moved.index(other) + 1, action)
                ranks = list(schedule.ranks)
                ranks[number] = tuple(moved)
                return Schedule(tuple(ranks))
    return None


def _without(schedule, source, condition, at_end=False):
    """Removes a random action that meets the condition, or moves it to the end of its rank."""
    candidates = [(rank, action) for rank, action in schedule if condition(action)]
    if not candidates:
        return None
    rank, chosen = source.choice(candidates)
    rows = [list(row) for row in schedule.ranks]
    rows[rank].remove(chosen)
    rows[rank] += [chosen] if at_end else []
    return Schedule(tuple(map(tuple, rows)))


def test_parsing_matches_the_longest_kind():
    assert parse("10SEND_B12") == Action(10, "SEND_B", 12)
    assert parse("3W1") == Action(3, "W", 1)
    assert from_csv("(0F3;1B2)OVERLAP_F_B,,0F4\n").ranks == (
        (Action(0, "F", 3), Action(1, "B", 2), Action(0, "F", 4)),
    )


def test_balance_cuts_by_weight_and_adds_up_the_stages_of_a_rank():
    assert balance([1.0] * 8, [0, 1, 2, 3]) == [2, 2, 2, 2]
    assert balance([1, 1, 1, 1, 1, 3], [0, 1]) == [4, 2]
    # From equal stages, every border has to move to give the last stage's part to the first.
    assert balance([3.4, *[3.1] * 22, 13.7], [0, 1, 2, 3]) == [7, 7, 7, 3]
    # In a V rank 0 has the first and the last stage: a heavy last part makes both shorter.
    parts = [1.0] * 15 + [3.0]
    sizes = balance(parts, [0, 1, 1, 0])
    assert sizes[0] + sizes[3] == 7
    assert sizes[1] + sizes[2] == 9
    with pytest.raises(ValueError, match="stages is 4; the network has 3 parts to cut"):
        balance([1.0] * 3, [0, 1, 2, 3])


def test_checking_takes_time_in_proportion_to_the_ranks():
    """Twelve times the ranks took 60 times as long while each rank scanned all stages."""

    def seconds(ranks):
        schedule = build("1f1b", ranks=ranks, micro_batches=1)
        start = time.process_time()
        check(schedule)
        return time.process_time() - start

    assert min(seconds(3000) for _ in range(4)) < 30 * min(seconds(250) for _ in range(5))
