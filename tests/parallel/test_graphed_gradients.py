"""Tests recorded data-parallel steps: on a CPU with a replacement for CUDA graphs, and on two GPUs over
NCCL.
"""

import contextlib
import copy

import pytest
import torch
from tests.parallel.graphs import RunAgain
from torch import nn

from stepgauge.parallel.data_parallel import BucketedDataParallel, NaiveDataParallel
from stepgauge.parallel.graphed_gradients import GraphedGradients
from stepgauge.runtime.launch import launch
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.model import ModelSpec

SHAPE = ModelSpec(vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=2, num_heads=2)


class Loss(nn.Module):
    """A network with a buffer that forward changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_BD, y_BD):
        self.calls += 1
        return (self.layers(x_BD) - y_BD).square().mean()


def batches(rank, device, number=3):
    draw = torch.Generator().manual_seed(rank)
    return [[torch.randn(4, 8, generator=draw).to(device) for _ in range(2)] for _ in range(number)]


def trained(module, gradients, given):
    """Returns the weights after a step of SGD for each batch, and the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for batch in given:
        losses.append(gradients(batch).detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), torch.stack(losses)


def eagerly(module):
    def gradients(batch):
        loss = module(*batch)
        loss.backward()
        return loss

    return gradients


def test_replays_equal_eager_steps():
    module = Loss()
    alone = copy.deepcopy(module)
    graphed = GraphedGradients(module, RunAgain())
    given = batches(0, "cpu")
    found = trained(module, lambda batch: graphed(batch, 1), given)
    expected = trained(alone, eagerly(alone), given)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # Each replay on a CPU runs forward again; warm-ups and the recording must not count.
    assert module.calls == alone.calls == 3


def test_changes_after_the_recording_are_refused():
    module, (batch,) = Loss(), batches(0, "cpu", 1)
    graphed = GraphedGradients(module, RunAgain())
    graphed(batch, 1)
    with pytest.raises(RuntimeError, match="set it to None before"):
        graphed(batch, 1)
    module.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match="accumulates 2 batches"):
        graphed(batch, 2)
    with pytest.raises(ValueError, match="the batch has shapes"):
        graphed([part[:2] for part in batch], 1)
    module.layers[0].weight.data = module.layers[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="weights have moved"):
        graphed(batch, 1)


@pytest.mark.parametrize("output", [lambda x: (x.sum(),), lambda x: x])
def test_a_module_that_does_not_return_the_loss_is_refused(output):
    class Outputs(torch.nn.Linear):
        def forward(self, x):
            return output(super().forward(x))

    graphed = GraphedGradients(Outputs(2, 2), RunAgain())
    with pytest.raises(TypeError, match="a recorded step needs the loss, one number"):
        graphed([torch.ones(3, 2)], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrapper": "flat"}, "wrapper is 'flat', which cannot be captured"),
        ({"wrapper": "zero3"}, "wrapper is 'zero3', which cannot be captured"),
        ({"device": "cpu"}, "device is 'cpu', which has no CUDA graphs"),
        ({"backend": "gloo"}, "communicates on the host"),
        ({"compile": "reduce-overhead"}, "which captures CUDA graphs itself"),
        ({"precision": "fp16"}, "whose loss scaling reads values on the host"),
        ({"reduce_dtype": "bf16"}, "which cannot be captured"),
    ],
)
def test_steps_that_cannot_be_captured_are_refused(changes, message):
    fields = {"wrapper": "bucketed", "device": "cuda", "cuda_graphs": True} | changes
    with pytest.raises(ValueError, match=message):
        DataParallelSpec(model=SHAPE, **fields)


def on_ranks():
    """Returns the largest difference of weights and losses from those of eager steps, by wrapper."""
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", rank)
    found = {}
    for name, wrap in (
        ("naive", NaiveDataParallel),
        ("bucketed", lambda module: BucketedDataParallel(module, 0.0005)),
    ):
        module = wrap(Loss().to(device))
        alone = copy.deepcopy(module)
        given = batches(rank, device)
        graphed = GraphedGradients(module, CudaGraphs(device), contextlib.nullcontext)
        ours = trained(module, lambda batch, run=graphed: run(batch, 1), given)
        theirs = trained(alone, eagerly(alone), given)
        found[name] = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
        del graphed  # a graph must be destroyed before its communicator
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_replays_over_nccl_equal_eager_steps():
    for rank in launch(on_ranks, ranks=2, device="cuda"):
        assert all(difference <= 1e-5 for difference in rank.values()), rank
