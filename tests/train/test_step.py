"""Compares the training step with plain torch under SGD (Adam would hide a gradient that is wrong by
a factor).
"""

import pytest
import torch

from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.model import ModelSpec
from stepgauge.train.build import decay_groups
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
    return torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1)).split(
        (16, 1), dim=1
    )[0], torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(2))


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


def test_a_step_equals_plain_torch():
    before, gradient = by_hand()
    assert torch.allclose(train(make()), before - 0.5 * gradient, atol=1e-7, rtol=0)


def test_accumulation_equals_one_step_of_the_whole_batch():
    before, gradient = by_hand()
    after = train(make(), parts=4)
    assert ((after - before) + 0.5 * gradient).norm() / gradient.norm() < 1e-5


def test_gradients_are_freed():
    step = make()
    train(step)
    assert all(p.grad is None for p in step.module.parameters())


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 0.03), ("fp16", 0.01)]
)
def test_mixed_precisions_take_the_same_step(precision, tolerance):
    """With fp16 this includes loss scaling: a gradient that is not unscaled would be off by 65536."""
    before, gradient = by_hand()
    after = train(make(precision))
    moved = (after - before) / -0.5
    assert (moved - gradient).norm() / gradient.norm() < tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_norm_of_all_gradients(precision):
    before, gradient = by_hand()
    limit = gradient.norm().item() / 3
    after = train(make(precision, max_gradient_norm=limit))
    assert (after - before).norm().item() == pytest.approx(0.5 * limit, rel=0.01)


def test_pure_bf16_has_bf16_parameters():
    step = make("bf16-pure")
    assert {p.dtype for p in step.module.parameters()} == {torch.bfloat16}
    train(step)


def test_matmul_mode_is_restored():
    before = torch.get_float32_matmul_precision()
    with PRECISIONS["tf32"].matmul_mode():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_sets_the_type_of_outputs(precision, dtype):
    step = make(precision)
    seen = []
    step.module.blocks[0].feed_forward.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    step.forward(*batch())
    assert seen == [dtype]


def test_without_loss_scaling_small_gradients_would_vanish():
    """With a loss 1e-6 times as large, unscaled gradients underflow in fp16."""
    step = make("fp16")
    step.backward(step.forward(*batch()) * 1e-6)
    step.scaler.unscale_(step.optimizer)
    scaled = torch.cat([p.grad.flatten() for p in step.module.parameters()])
    bare = make("fp16")
    (bare.forward(*batch()) * 1e-6).backward()
    unscaled = torch.cat([p.grad.flatten() for p in bare.module.parameters()])
    assert (unscaled == 0).float().mean() > 2 * (scaled == 0).float().mean() + 0.1


def test_only_matrices_have_weight_decay():
    model = TransformerLM(
        ModelSpec.preset("nano", vocab_size=64, context_length=16, norm="layernorm")
    )
    decayed, rest = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
