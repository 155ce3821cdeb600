"""--checkpointing budget: the plan's prediction fits, and equals the measured peak."""

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


def with_budget(share, spec=SPEC):
    """Returns the spec with a budget of this share of the peak without checkpointing."""
    full = solve(dataclasses.replace(spec, memory_gib=100.0))
    layers = spec.network.num_layers
    assert str(full.plan) == f"blocks 0, feed-forward 0, selective 0, none {layers}"
    return dataclasses.replace(spec, memory_gib=share * full.peak_bytes / GIB)


def test_the_budget_holds_in_every_command(tmp_path):
    spec = with_budget(0.7)
    record = memory.measure(spec)
    environment = record.environment
    predicted, budget = (
        environment[f"checkpointing_{name}_bytes"] for name in ("predicted_peak", "budget")
    )
    assert record.metrics["peak_bytes"].median == predicted <= budget == int(spec.memory_gib * GIB)
    assert not environment["checkpointing"].endswith("none 4")
    shared = {"model": SHAPE, "batch": 8, "optimizer": "sgd", "checkpointing": "budget"}
    shared["memory_gib"] = spec.memory_gib
    timed = step.run(StepSpec(**shared, warmup=0, steps=1, seconds=0))
    trained = train.run(TrainSpec(**shared, steps=1), folder=tmp_path)
    for other in (timed, trained):
        assert other.environment["checkpointing"] == environment["checkpointing"]


@pytest.mark.parametrize("compile", ["on", "blocks"])
def test_a_compiled_step_has_the_plan_of_the_eager_one(compile):
    eager = solve(with_budget(0.7)).plan
    assert eager.selective
    assert solve(with_budget(0.7, dataclasses.replace(SPEC, compile=compile))).plan == eager


def test_a_layout_has_the_plan_of_one_rank():
    fields = {"model": SHAPE, "batch": 16, "layout": "dp2 zero1", "checkpointing": "budget"}
    spec = with_budget(0.7)
    layout = LayoutSpec(**fields, optimizer="sgd", memory_gib=spec.memory_gib)
    assert solve(layout).plan == solve(spec).plan


def test_wrappers_add_or_save_memory():
    """With AdamW on two ranks, zero1 saves half of 8 bytes per parameter, and zero3 saves more."""
    step = dataclasses.replace(SPEC, optimizer="adamw", checkpointing="none")

    def added_bytes(wrapper):
        return _wrapper_bytes(step, Layout(data=2, wrapper=wrapper))

    gradients = 4 * SHAPE.num_parameters
    assert added_bytes("bucketed") == 0 <= added_bytes("flat") <= gradients
    assert added_bytes("zero3") < added_bytes("zero1") < -0.9 * gradients
    sgd_step = dataclasses.replace(step, optimizer="sgd")
    assert _wrapper_bytes(sgd_step, Layout(data=2, wrapper="zero1")) == 0


def train_with_a_budget(fields, folder):
    """Trains with two wrappers, and returns the losses and the plan of each, equal on all ranks."""
    results = []
    for wrapper in ("bucketed", "zero3"):
        spec = TrainSpec(**fields, ranks=2, data_parallel=wrapper)
        record = train.run(spec, folder=folder / wrapper)
        results.append((record.series["loss"], record.environment["checkpointing"]))
    by_rank = [None, None]
    torch.distributed.all_gather_object(by_rank, results)
    assert by_rank[0] == by_rank[1]
    return results


def test_ranks_share_one_plan_and_train_like_without_checkpointing(tmp_path):
    shape = dataclasses.replace(SHAPE, num_layers=2)  # each rank predicts eight steps of it
    shared = {"model": shape, "batch": 8, "optimizer": "sgd", "steps": 2, "evaluate_windows": 1}
    shared["corpus"] = __file__
    expected = train.run(TrainSpec(**shared), folder=tmp_path / "single").series["loss"]
    memory_gib = with_budget(0.75, dataclasses.replace(SPEC, model=shape, batch=4)).memory_gib
    fields = shared | {"checkpointing": "budget", "memory_gib": memory_gib}
    for loss, plan in launch(train_with_a_budget, fields, tmp_path, ranks=2)[0]:
        assert not plan.endswith("none 2")
        assert loss == pytest.approx(expected, abs=2e-5)


def test_the_error_for_a_budget_that_is_too_small_has_the_least_memory():
    with pytest.raises(ValueError, match="too small for every plan: the least found is"):
        solve(with_budget(0.1))
