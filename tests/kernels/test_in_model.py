"""The fused parts in the whole model: the same function, gradient and loss curve as the stock
parts.
"""

import dataclasses

import pytest
import torch

from stepgauge.models.parts import build_optimizer
from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.model import ModelSpec
from stepgauge.train.data import Corpus, read_text
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep

STOCK = ModelSpec.preset("nano", vocab_size=256, context_length=64)
PARTS = {"norm": "triton", "attention": "triton", "loss": "fused"}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


def pair(spec, device, **parts):
    """Returns two models with equal weights, the second with the given parts."""
    torch.manual_seed(0)
    stock = TransformerLM(spec, device=device)
    other = TransformerLM(dataclasses.replace(spec, **parts), device=device)
    other.load_state_dict(stock.state_dict())
    return stock, other


def gradients(model, tokens, targets):
    model.zero_grad()
    model(tokens, targets).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [*({name: part} for name, part in PARTS.items()), PARTS], ids=str)
def test_the_models_gradient_equals_the_default_parts(device, parts):
    stock, fused = pair(STOCK, torch.device(device), **parts)
    tokens, targets = torch.randint(256, (2, 3, 64), device=device)
    expected, got = (gradients(model, tokens, targets) for model in (stock, fused))
    assert (got - expected).norm() / expected.norm() < 1e-5


def curve(spec, device, precision, optimizer, steps, *, compiled=False):
    torch.manual_seed(0)
    model = TransformerLM(spec, device=device)
    update = build_optimizer(
        optimizer, model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)
    )
    loss = torch.compile(model, fullgraph=True) if compiled else model
    step = TrainingStep(
        model, update, PRECISIONS[precision], device, max_gradient_norm=1.0, compute_loss=loss
    )
    corpus = Corpus.of(read_text("stdlib"))
    losses = []
    for number in range(steps):
        tokens, targets = corpus.batch(number, batch=4, length=spec.context_length, seed=0)
        value = step.forward(tokens.to(device), targets.to(device))
        step.backward(value)
        step.update()
        losses.append(value.detach())
    return torch.stack(losses).double().cpu()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 3e-2), ("fp16", 3e-2)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_curve_over_200_steps_on_a_gpu_equals_the_default_parts(
    precision, tolerance, compiled
):
    cuda = torch.device("cuda")
    spec = ModelSpec.preset("tiny", vocab_size=256, context_length=128)
    stock = curve(spec, cuda, precision, "adamw", 200)
    fused = curve(
        dataclasses.replace(spec, **PARTS), cuda, precision, "fused", 200, compiled=compiled
    )
    assert (fused - stock).abs().mean() < tolerance
    assert stock[-10:].mean() < stock[0] - 1
