"""The training step against plain torch, with SGD: Adam would hide a gradient that is wrong by a factor."""

import pytest
import torch

from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.model import ModelSpec
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep

CPU = torch.device("cpu")


def make(precision="fp32", **settings):
    torch.manual_seed(0)
    spec = ModelSpec.preset("nano", vocab_size=64, context_length=16)
    model = TransformerLM(spec).to(PRECISIONS[precision].parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainingStep(model, optimizer, PRECISIONS[precision], CPU, **settings)


def weights(step):
    return torch.cat([p.detach().double().flatten() for p in step.module.parameters()])


def batch():
    return torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1)).split((16, 1), dim=1)[
        0
    ], torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(2))


def train(step, parts=1):
    for tokens, targets in zip(*(x.chunk(parts) for x in batch()), strict=True):
        step.backward(step.forward(tokens, targets) / parts)
    step.update()
    return weights(step)


def by_hand():
    step = make()
    before = weights(step)
    loss = step.module(*batch())
    gradients = torch.autograd.grad(loss, list(step.module.parameters()))
    flat = torch.cat([g.double().flatten() for g in gradients])
    return before, flat


def test_a_step_is_that_of_plain_torch():
    before, gradient = by_hand()
    assert torch.allclose(train(make()), before - 0.5 * gradient, atol=1e-7, rtol=0)


def test_accumulation_gives_the_whole_batchs_step():
    before, gradient = by_hand()
    after = train(make(), parts=4)
    assert ((after - before) + 0.5 * gradient).norm() / gradient.norm() < 1e-5


def test_gradients_are_freed():
    step = make()
    train(step)
    assert all(p.grad is None for p in step.module.parameters())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 0.03), ("fp16", 0.01)])
def test_mixed_precisions_take_the_same_step(precision, tolerance):
    """Loss scaling among them: a scale that stays in the gradient would be off by 65536."""
    before, gradient = by_hand()
    after = train(make(precision))
    moved = (after - before) / -0.5
    assert (moved - gradient).norm() / gradient.norm() < tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_whole_gradient(precision):
    before, gradient = by_hand()
    limit = gradient.norm().item() / 3
    after = train(make(precision, max_gradient_norm=limit))
    assert (after - before).norm().item() == pytest.approx(0.5 * limit, rel=0.01)


def test_pure_bf16_keeps_its_parameters_there():
    step = make("bf16-pure")
    assert {p.dtype for p in step.module.parameters()} == {torch.bfloat16}
    train(step)


def test_matmul_mode_is_restored():
    before = torch.get_float32_matmul_precision()
    with PRECISIONS["tf32"].matmul_mode():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
