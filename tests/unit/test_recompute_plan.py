"""Which blocks are computed again: the cheapest plan that saves enough."""

import dataclasses

import pytest

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import BlockCosts, RecomputePlan, cheapest, plans
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec

COSTS = BlockCosts(
    kept_bytes={"none": 100, "selective": 60, "feed-forward": 30, "blocks": 10},
    again_us={"none": 0.0, "selective": 1.0, "feed-forward": 2.0, "blocks": 4.0},
)
MODEL = ModelSpec.preset("nano")


def test_cheapest_is_the_least_time_of_all_that_fit():
    for needed in range(0, 400, 7):
        plan = cheapest(4, COSTS, needed)
        fitting = [p for p in plans(4) if COSTS.saved_bytes(p) >= needed]
        if not fitting:
            assert plan == RecomputePlan(4, blocks=4)
            continue
        assert COSTS.saved_bytes(plan) >= needed
        assert COSTS.us(plan) == min(map(COSTS.us, fitting))
    # 40 bytes a microsecond beat 35 and 22.5, until they do not suffice
    assert cheapest(4, COSTS, 160) == RecomputePlan(4, selective=4)
    assert cheapest(4, COSTS, 181) == RecomputePlan(4, feed_forward=1, selective=3)
    assert str(cheapest(4, COSTS, 281)) == "blocks 1, feed-forward 3, selective 0, none 0"


def test_only_what_has_costs_is_planned():
    def without(*names):
        fields = dataclasses.asdict(COSTS)
        return BlockCosts(
            **{
                field: {n: v for n, v in of.items() if n not in names}
                for field, of in fields.items()
            }
        )

    assert cheapest(4, without("feed-forward"), 161) == RecomputePlan(4, blocks=1, selective=2)
    assert cheapest(4, without("feed-forward", "selective"), 160) == RecomputePlan(4, blocks=2)


def test_first_blocks_are_computed_again():
    plan = RecomputePlan(4, blocks=1, feed_forward=1, selective=1)
    assert [plan.of(layer) for layer in range(4)] == ["blocks", "feed-forward", "selective", "none"]


@pytest.mark.parametrize(
    ("spec", "fields", "words"),
    [
        (StepSpec, {"phases": "forward"}, "that of a step"),
        (TrainSpec, {"accumulation": 2}, "solved for one forward and backward a step"),
        (LayoutSpec, {"accumulation": 2}, "solved for one forward and backward a step"),
        (TrainSpec, {"layout": "tp2"}, "solved for data parallel ranks"),
        (LayoutSpec, {"layout": "tp2"}, "solved for data parallel ranks"),
        (DataParallelSpec, {}, "checkpointing is 'budget'; choose one of none, blocks"),
    ],
)
def test_what_has_no_budget_says_so(spec, fields, words):
    with pytest.raises(ValueError, match=words):
        spec(model=MODEL, checkpointing="budget", **fields)


def test_memory_is_of_no_use_without_a_budget():
    spec = StepSpec(model=MODEL, memory_gib=3.0)
    assert spec.canonical().memory_gib == 0.0
    assert dataclasses.replace(spec, checkpointing="budget").canonical().memory_gib == 3.0
