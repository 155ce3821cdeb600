"""Which blocks are computed again: the cheapest plan that saves enough."""

import dataclasses

import pytest

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import BlockCosts, RecomputePlan, cheapest, plans
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec

COSTS = BlockCosts(
    none_bytes=100, selective_bytes=60, blocks_bytes=10, selective_us=1.0, blocks_us=4.0
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
    # 40 bytes a microsecond beat 22.5, until they do not suffice
    assert cheapest(4, COSTS, 160) == RecomputePlan(4, selective=4)
    assert str(cheapest(4, COSTS, 161)) == "blocks 1, selective 2, none 1"
    assert cheapest(4, COSTS, 160, selective=False) == RecomputePlan(4, blocks=2)


def test_first_blocks_are_computed_again():
    plan = RecomputePlan(4, blocks=1, selective=2)
    assert [plan.of(layer) for layer in range(4)] == ["blocks", "selective", "selective", "none"]


@pytest.mark.parametrize(
    ("spec", "fields", "words"),
    [
        (StepSpec, {"phases": "forward"}, "that of a step"),
        (TrainSpec, {"layout": "tp2"}, "solved for data parallel ranks"),
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
