"""Recorded and replayed stages: slots and gradients on a CPU, CUDA graphs on GPUs."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from tests.parallel.graphs import RunAgain
from tests.parallel.pipelines import batch, mean_loss, network
from tests.parallel.test_pipeline import difference_in_weights, update
from torch import nn

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.interfaces import Meta
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.runtime.launch import launch
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.spec.plan.pipeline import SCHEDULES, build

INPUT = Meta(torch.Size([3, 4]), torch.float32, True)


def graphed(module, slots, splits):
    stage = Stage(module, context=contextlib.nullcontext, splits=splits)
    graphed_stage = GraphedStage(stage, RunAgain(), slots, torch.device("cpu"))
    described, _ = graphed_stage.prepare([torch.zeros(INPUT.shape)], [True])
    graphed_stage.record([INPUT], described.outputs, ())
    return graphed_stage


@pytest.mark.parametrize("splits", [False, True])
def test_slots_are_reused_and_gradients_end_up_in_grad(splits):
    """Two slots for three micro-batches. When the three steps begin, `.grad` is None, kept from the
    step before, and for one parameter a tensor of the user.
    """
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    reference = copy.deepcopy(module)
    stage = graphed(module, 2, splits)
    assert all(parameter.grad is None for parameter in module.parameters())
    for step in range(3):
        inputs = [torch.randn(INPUT.shape).requires_grad_() for _ in range(3)]
        weights = [torch.randn(INPUT.shape) for _ in range(3)]
        user_gradient = torch.ones(4)
        if step == 2:
            module[0].bias.grad, reference[0].bias.grad = user_gradient, torch.ones(4)
        stage.begin()
        outputs = {}
        for kind, number in (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)):
            if kind == "F":
                (outputs[number],) = stage.forward(number, [inputs[number]], [True])
            else:
                input_gradients = stage.backward(number, [weights[number]])
                expected = reference(inputs[number])
                expected.backward(weights[number])
                assert torch.allclose(outputs[number], expected, atol=1e-6)
                assert torch.allclose(input_gradients[0], inputs[number].grad, atol=1e-6)
        stage.finish()
        pairs = zip(module.named_parameters(), reference.parameters(), strict=True)
        for (name, actual), expected in pairs:
            assert torch.allclose(actual.grad, expected.grad, atol=1e-5), (step, name)
    assert module[0].bias.grad is user_gradient
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="weights have moved"):
        stage.begin()


def test_in_flight_counts_the_micro_batches_between_forward_and_backward():
    first = {name: build(name, ranks=2, micro_batches=8).in_flight(0) for name in SCHEDULES}
    assert (first["gpipe"], first["1f1b"], first["zb-h1"]) == (8, 2, 2)
    assert build("1f1b", ranks=2, micro_batches=8).in_flight(1) == 1


# schedule, network, precision
ON_GPUS = [
    ("1f1b", "transformer", "fp32"),
    ("gpipe", "bert", "bf16"),
    ("zbv", "transformer untied", "bf16"),
    ("zbv", "list", "fp32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_replays_compute_the_same_as_eager_stages(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; this machine has {torch.cuda.device_count()}")
    for differences in launch(all_differences, ranks=ranks, device="cuda"):
        assert {case: text for case, text in differences.items() if text} == {}


def all_differences():
    return {case: difference(*case) for case in ON_GPUS}


def difference(schedule_name, name, precision):
    """Trains three steps under SGD, recorded and eager, and describes the first difference."""
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=4)
    modules, ties, share = network(name, schedule.num_stages)
    modules = [module.to(device) for module in modules]
    reference = copy.deepcopy(modules)

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

    recorded, eager = pipeline(modules, CudaGraphs(device)), pipeline(reference, None)
    for number in range(3):
        tokens, all_targets, some_targets = (part.to(device) for part in batch(number))
        targets = some_targets if share else all_targets
        losses = [each.step((tokens,), (targets,)) for each in (recorded, eager)]
        if losses[0] is not None and not torch.allclose(*losses, atol=1e-3):
            return f"step {number}: loss {losses[0]}, eager {losses[1]}"
        if text := difference_in_weights(recorded, reference, number):
            return text
        update(recorded.parameters())
        update(eager.parameters())
    return ""
