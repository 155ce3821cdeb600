"""--checkpointing budget: what is predicted for the plan fits, and is what the step takes."""

import dataclasses

import pytest

from stepgauge.bench import memory, step, train
from stepgauge.bench.checkpoint_budget import GIB, solve
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec

SHAPE = ModelSpec(vocab_size=256, context_length=64, d_model=32, d_ff=64, num_layers=4, num_heads=2)
SPEC = MemorySpec(model=SHAPE, batch=8, optimizer="sgd", checkpointing="budget")


def of(share, spec=SPEC):
    """The spec with that share of what no checkpointing takes."""
    whole = solve(dataclasses.replace(spec, memory_gib=100.0))
    assert str(whole.plan) == "blocks 0, selective 0, none 4"
    return dataclasses.replace(spec, memory_gib=share * whole.peak_bytes / GIB)


def test_the_budget_holds_in_every_command(tmp_path):
    spec = of(0.7)
    record = memory.measure(spec)
    told = record.environment
    predicted, budget = (
        told[f"checkpointing_{name}_bytes"] for name in ("predicted_peak", "budget")
    )
    assert record.metrics["peak_bytes"].median == predicted <= budget == int(spec.memory_gib * GIB)
    assert not told["checkpointing"].endswith("none 4")
    shared = {"model": SHAPE, "batch": 8, "optimizer": "sgd", "checkpointing": "budget"}
    shared["memory_gib"] = spec.memory_gib
    timed = step.run(StepSpec(**shared, warmup=0, steps=1, seconds=0))
    trained = train.run(TrainSpec(**shared, steps=1), folder=tmp_path)
    for other in (timed, trained):
        assert other.environment["checkpointing"] == told["checkpointing"]


def test_a_budget_that_nothing_holds_says_the_least():
    with pytest.raises(ValueError, match="no checkpointing holds: the least found is"):
        solve(of(0.1))
