"""--checkpointing budget: what is predicted for the plan fits, and is what the step takes."""

import dataclasses

import pytest
import torch

from stepgauge.bench import memory, step, train
from stepgauge.bench.checkpoint_budget import GIB, _wrapper_bytes, solve
from stepgauge.runtime.launch import launch
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec

SHAPE = ModelSpec(vocab_size=256, context_length=64, d_model=32, d_ff=64, num_layers=4, num_heads=2)
SPEC = MemorySpec(model=SHAPE, batch=8, optimizer="sgd", checkpointing="budget")


def of(share, spec=SPEC):
    """The spec with that share of what no checkpointing takes."""
    whole = solve(dataclasses.replace(spec, memory_gib=100.0))
    assert str(whole.plan) == "blocks 0, feed-forward 0, selective 0, none 4"
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


@pytest.mark.parametrize("compile", ["on", "blocks"])
def test_a_compiled_step_is_bounded_by_the_eager_one(compile):
    eager = solve(of(0.7)).plan
    assert eager.selective
    assert solve(of(0.7, dataclasses.replace(SPEC, compile=compile))).plan == eager


def test_a_layout_has_the_plan_of_a_rank():
    fields = {"model": SHAPE, "batch": 16, "layout": "dp2 zero1", "checkpointing": "budget"}
    spec = of(0.7)
    assert (
        solve(LayoutSpec(**fields, optimizer="sgd", memory_gib=spec.memory_gib)).plan
        == solve(spec).plan
    )


def test_a_wrapper_shards_or_adds():
    """Of AdamW on two ranks: zero1 has half of 8 bytes a parameter, zero3 less."""
    step = dataclasses.replace(SPEC, optimizer="adamw", checkpointing="none")

    def more(wrapper):
        return _wrapper_bytes(step, Layout(data=2, wrapper=wrapper))

    gradients = 4 * SHAPE.num_parameters
    assert more("bucketed") == 0 <= more("flat") <= gradients
    assert more("zero3") < more("zero1") < -0.9 * gradients
    of_sgd = dataclasses.replace(step, optimizer="sgd")
    assert _wrapper_bytes(of_sgd, Layout(data=2, wrapper="zero1")) == 0


def ranks_under_a_budget(fields, folder):
    """Each wrapper's curve and what its ranks were told."""
    found = []
    for wrapper in ("bucketed", "zero3"):
        spec = TrainSpec(**fields, ranks=2, data_parallel=wrapper)
        record = train.run(spec, folder=folder / wrapper)
        found.append((record.series["loss"], record.environment["checkpointing"]))
    every = [None, None]
    torch.distributed.all_gather_object(every, found)
    assert every[0] == every[1]
    return found


def test_ranks_have_one_plan_and_the_curve_of_none(tmp_path):
    shared = {"model": SHAPE, "batch": 8, "optimizer": "sgd", "steps": 2, "evaluate_windows": 1}
    shared["corpus"] = __file__
    alone = train.run(TrainSpec(**shared), folder=tmp_path / "alone").series["loss"]
    half = of(0.75, dataclasses.replace(SPEC, batch=4)).memory_gib
    fields = shared | {"checkpointing": "budget", "memory_gib": half}
    for loss, told in launch(ranks_under_a_budget, fields, tmp_path, ranks=2)[0]:
        assert not told.endswith("none 4")
        assert loss == pytest.approx(alone, abs=2e-5)


def test_a_budget_that_nothing_holds_says_the_least():
    with pytest.raises(ValueError, match="no checkpointing holds: the least found is"):
        solve(of(0.1))
