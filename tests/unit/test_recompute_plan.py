"""Recompute plans: the cheapest plan that saves enough memory, and options of a budget."""

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
    recompute_us={"none": 0.0, "selective": 1.0, "feed-forward": 2.0, "blocks": 4.0},
)
MODEL = ModelSpec.preset("nano")


def test_the_cheapest_plan_takes_the_least_time_of_all_that_fit():
    for needed in range(0, 400, 7):
        plan = cheapest(4, COSTS, needed)
        fitting = [p for p in plans(4) if COSTS.saved_bytes(p) >= needed]
        if not fitting:
            assert plan == RecomputePlan(4, blocks=4)
            continue
        assert COSTS.saved_bytes(plan) >= needed
        assert COSTS.us(plan) == min(map(COSTS.us, fitting))
    # "selective" saves most per microsecond (40 bytes; the others 35 and 22.5), until it is not enough
    assert cheapest(4, COSTS, 160) == RecomputePlan(4, selective=4)
    assert cheapest(4, COSTS, 181) == RecomputePlan(4, feed_forward=1, selective=3)
    assert str(cheapest(4, COSTS, 281)) == "blocks 1, feed-forward 3, selective 0, none 0"


def test_only_checkpointing_with_known_costs_is_planned():
    def without(*names):
        fields = dataclasses.asdict(COSTS)
        return BlockCosts(
            **{
                field: {name: cost for name, cost in costs.items() if name not in names}
                for field, costs in fields.items()
            }
        )

    assert cheapest(4, without("feed-forward"), 161) == RecomputePlan(4, blocks=1, selective=2)
    assert cheapest(4, without("feed-forward", "selective"), 160) == RecomputePlan(4, blocks=2)


def test_the_first_blocks_keep_the_least():
    plan = RecomputePlan(4, blocks=1, feed_forward=1, selective=1)
    assert [plan.of(layer) for layer in range(4)] == ["blocks", "feed-forward", "selective", "none"]


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (StepSpec, {"phases": "forward"}, "--checkpointing budget needs step"),
        (TrainSpec, {"accumulation": 2}, "--checkpointing budget needs 1"),
        (LayoutSpec, {"accumulation": 2}, "--checkpointing budget needs 1"),
        (TrainSpec, {"layout": "tp2"}, "supports only data parallel layouts"),
        (LayoutSpec, {"layout": "tp2"}, "supports only data parallel layouts"),
        (DataParallelSpec, {}, "checkpointing is 'budget'; choose one of none, blocks"),
    ],
)
def test_specs_that_support_no_budget_say_so(spec, fields, message):
    with pytest.raises(ValueError, match=message):
        spec(model=MODEL, checkpointing="budget", **fields)


def test_memory_gib_is_ignored_without_a_budget():
    spec = StepSpec(model=MODEL, memory_gib=3.0)
    assert spec.canonical().memory_gib == 0.0
    assert dataclasses.replace(spec, checkpointing="budget").canonical().memory_gib == 3.0
