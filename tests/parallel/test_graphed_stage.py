"""Stages that are recorded and replayed: slots and gradients on a CPU, CUDA graphs on GPUs."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from tests.parallel.graphs import RunAgain
from tests.parallel.pipelines import batch, mean_loss, network
from tests.parallel.test_pipeline import differing, update
from torch import nn

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.between import Meta
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.runtime.launch import launch
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.spec.plan.pipeline import SCHEDULES, build

WIDE = Meta(torch.Size([3, 4]), torch.float32, True)


def graphed(module, slots, splits):
    stage = Stage(module, context=contextlib.nullcontext, splits=splits, recorded=True)
    found = GraphedStage(stage, RunAgain(), slots, torch.device("cpu"))
    given, _ = found.prepare([torch.zeros(WIDE.shape)], [True])
    found.record([WIDE], given.outputs, ())
    return found


@pytest.mark.parametrize("splits", [False, True])
def test_slots_are_used_again_and_gradients_are_grad(splits):
    """Two slots for three micro-batches; `.grad` is None, then kept, then a tensor of the user's."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    alone = copy.deepcopy(module)
    stage = graphed(module, 2, splits)
    assert all(parameter.grad is None for parameter in module.parameters())
    for step in range(3):
        inputs = [torch.randn(WIDE.shape).requires_grad_() for _ in range(3)]
        weights = [torch.randn(WIDE.shape) for _ in range(3)]
        own = torch.ones(4)
        if step == 2:
            module[0].bias.grad, alone[0].bias.grad = own, torch.ones(4)
        stage.begin()
        ran = {}
        for kind, number in ("F0", "F1", "B0", "F2", "B1", "B2"):
            place = int(number)
            if kind == "F":
                (ran[place],) = stage.forward(place, [inputs[place]], [True])
            else:
                found = stage.backward(place, [weights[place]])
                expected = alone(inputs[place])
                expected.backward(weights[place])
                assert torch.allclose(ran[place], expected, atol=1e-6)
                assert torch.allclose(found[0], inputs[place].grad, atol=1e-6)
        stage.finish()
        for (name, ours), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-5), (step, name)
    assert module[0].bias.grad is own
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="weights have moved"):
        stage.begin()


def test_a_stage_has_as_many_slots_as_micro_batches_are_in_flight():
    found = {name: build(name, ranks=2, micro_batches=8).in_flight(0) for name in SCHEDULES}
    assert (found["gpipe"], found["1f1b"], found["zb-h1"]) == (8, 2, 2)
    assert build("1f1b", ranks=2, micro_batches=8).in_flight(1) == 1


# Schedule, network, and what is around every forward.
ON_GPUS = [
    ("1f1b", "transformer", "fp32"),
    ("gpipe", "bert", "bf16"),
    ("zbv", "transformer untied", "bf16"),
    ("zbv", "list", "fp32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_replays_are_what_eager_stages_compute(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; this machine has {torch.cuda.device_count()}")
    for found in launch(replays_beside_eager, ranks=ranks, device="cuda"):
        assert {case: told for case, told in found.items() if told} == {}


def replays_beside_eager():
    return {case: difference(*case) for case in ON_GPUS}


def difference(schedule_name, name, precision):
    """Three steps under SGD, recorded and eager; what differs, in words."""
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=4)
    modules, ties, share = network(name, schedule.num_stages)
    modules = [module.to(device) for module in modules]
    alone = copy.deepcopy(modules)

    def context():
        return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")

    def pipeline(stages, graphs):
        return Pipeline(
            stages,
            schedule,
            loss=mean_loss,
            tied=ties,
            share=share,
            context=context,
            device=device,
            graphs=graphs,
            transport="auto" if schedule.num_ranks > 1 else "messages",
        )

    recorded, eager = pipeline(modules, CudaGraphs(device)), pipeline(alone, None)
    for number in range(3):
        tokens, targets, few = (part.to(device) for part in batch(number))
        targets = few if share else targets
        losses = [each.step((tokens,), (targets,)) for each in (recorded, eager)]
        if losses[0] is not None and not torch.allclose(*losses, atol=1e-3):
            return f"step {number}: loss {losses[0]}, eager {losses[1]}"
        if told := differing(recorded, alone, number):
            return told
        update(recorded.parameters())
        update(eager.parameters())
    return ""
