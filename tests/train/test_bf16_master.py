"""Precision bf16-master trains as well as fp32; bf16 parameters without masters do not."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepgauge.bench.build import least_bytes
from stepgauge.kernels.adamw import FusedAdamW
from stepgauge.parallel.named_state import load_state, state_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.train.build import build_step
from stepgauge.train.data import random_batch
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep

TINY = dataclasses.replace(
    ModelSpec.preset("nano"),
    vocab_size=32,
    context_length=16,
    d_model=32,
    num_layers=1,
    num_heads=2,
)
STEPS = 150


def make(precision, optimizer="fused"):
    spec = StepSpec(model=TINY, size="custom", precision=precision, optimizer=optimizer)
    return build_step(spec, lr=1e-4)


def make_small(precision):
    """Returns a step of a small network that predicts a token from the one before."""
    torch.manual_seed(0)
    chosen = PRECISIONS[precision]
    layers = nn.Embedding(32, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)
    module = nn.Sequential(*layers).to(chosen.parameters)
    optimizer = FusedAdamW(module.parameters(), lr=1e-4, master_weights=chosen.master_weights)

    def compute_loss(tokens, targets):
        return F.cross_entropy(module(tokens), targets)

    return TrainingStep(module, optimizer, chosen, torch.device("cpu"), compute_loss=compute_loss)


def pairs(num):
    """Yields tokens and targets; each token determines the next one."""
    generator = torch.Generator().manual_seed(1)
    follower = torch.randint(0, 32, (32,), generator=generator)
    for _ in range(num):
        tokens = torch.randint(0, 32, (64,), generator=generator)
        yield tokens, follower[tokens]


def curve(step, batches):
    losses = []
    for batch in batches:
        loss = step.forward(*batch)
        step.backward(loss)
        step.update()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_the_loss_falls_as_in_fp32_while_pure_bf16_lags():
    names = "fp32", "bf16-master", "bf16-pure"
    curves = {name: curve(make_small(name), pairs(STEPS)) for name in names}
    fp32, master, pure = (each[-20:].mean().item() for each in curves.values())
    assert fp32 < curves["fp32"][:10].mean() - 0.3  # it learns
    assert abs(master - fp32) < 0.01
    assert pure - fp32 > 0.05


def test_weights_and_gradients_are_bf16_and_masters_survive_a_checkpoint():
    step = make("bf16-master")
    batches = [random_batch(32, 2, 16, seed) for seed in range(6)]
    curve(step, batches[:3])
    other = make("bf16-master")
    state = copy.deepcopy(state_of(step.module, step.optimizer))
    load_state(other.module, other.optimizer, state)
    more = batches[3:]
    assert torch.equal(curve(step, more), curve(other, more))
    for p, q in zip(step.module.parameters(), other.module.parameters(), strict=True):
        master = step.optimizer.state[p]["master_param"]
        assert p.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(master, other.optimizer.state[q]["master_param"])
        assert torch.equal(p, master.bfloat16())
    step.backward(step.forward(*more[0]))
    assert all(p.grad.dtype == torch.bfloat16 for p in step.module.parameters())


def test_it_needs_the_fused_optimizer_and_16_bytes_per_parameter():
    with pytest.raises(ValueError, match="bf16-master needs --optimizer fused"):
        make("bf16-master", "adamw")
    spec = StepSpec(model=TINY, size="custom", precision="bf16-master", optimizer="fused")
    assert least_bytes(spec) == 16 * TINY.num_parameters
