"""Checkpointing does not change the gradients; on a CPU they are bitwise equal."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.bench.build import make_batch
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.step import CHECKPOINTING, StepSpec
from stepgauge.train.build import build_step

CHOICES = [(name, size) for name in CHECKPOINTING[1:] for size in (1, 2, 3)]
SPEC = StepSpec(
    model=ModelSpec(
        vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=4, num_heads=2
    ),
    batch=2,
    optimizer="sgd",
)


def _after_a_step(spec, recompute=None):
    """Returns the loss, the gradients and the parameters after a step of SGD (Adam would hide a wrong
    scale).
    """
    step = build_step(spec, lr=0.5, recompute=recompute)
    loss = step.forward(*make_batch(spec, torch.device("cpu")))
    step.backward(loss)
    gradients = [parameter.grad.clone() for parameter in step.module.parameters()]
    step.update()
    return [loss.detach(), *gradients, *(p.detach() for p in step.module.parameters())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("checkpointing", "size"), CHOICES)
def test_checkpointing_leaves_gradients_unchanged(checkpointing, size, precision):
    plain = dataclasses.replace(SPEC, precision=precision)
    chosen = dataclasses.replace(plain, checkpointing=checkpointing, checkpoint_blocks=size)
    for expected, found in zip(_after_a_step(plain), _after_a_step(chosen), strict=True):
        assert torch.equal(expected, found)


def test_a_recompute_plan_leaves_gradients_unchanged():
    expected = _after_a_step(SPEC)
    for counts in ((1, 1, 2), (4, 0, 0), (0, 1, 0)):
        found = _after_a_step(SPEC, RecomputePlan(4, *counts))
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


class Products(TorchDispatchMode):
    """Counts the two-dimensional matrix products that run."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("checkpointing", "recomputed"), [("selective", 0), ("feed-forward", 4)])
def test_only_products_of_the_feed_forward_layer_are_recomputed(
    attention, checkpointing, recomputed
):
    """Gate and up in each of four blocks; no gradient needs the output of down."""
    model = dataclasses.replace(SPEC.model, attention=attention)
    chosen = dataclasses.replace(SPEC, model=model, checkpointing=checkpointing)
    step = build_step(chosen, lr=0.5)
    loss = step.forward(*make_batch(chosen, torch.device("cpu")))
    with Products() as products:
        step.backward(loss)
    assert products.number == 2 * (4 * 4 + 1) + recomputed


@pytest.mark.parametrize(
    ("checkpointing", "mode", "plan"),
    [
        ("nested", "on", None),
        ("selective", "blocks", None),
        ("feed-forward", "blocks", None),
        ("budget", "on", RecomputePlan(2, blocks=1, selective=1)),
    ],
)
def test_compiled_checkpointing_leaves_gradients_unchanged(checkpointing, mode, plan, monkeypatch):
    # The compiler's front end decides what is recomputed. Its kernels are tested elsewhere; compiling
    # them takes a minute.
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: compile(model, backend="aot_eager"))
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda m: setattr(m, "forward", compile(m.forward, backend="aot_eager")),
    )
    small = dataclasses.replace(SPEC, model=dataclasses.replace(SPEC.model, num_layers=2))
    torch._dynamo.reset()
    chosen = dataclasses.replace(
        small, checkpointing=checkpointing, checkpoint_blocks=2, compile=mode
    )
    for expected, found in zip(_after_a_step(small), _after_a_step(chosen, plan), strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)
