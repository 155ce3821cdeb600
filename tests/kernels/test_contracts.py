"""Contracts of all operations: a second derivative is right or raises, and types that an operation
does not support are refused on every device.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from stepgauge.kernels import attention as attention_package
from stepgauge.kernels.attention import (
    FlashAttentionTriton,
    attention,
    flash_attention,
    reference,
)
from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
from stepgauge.kernels.rms_norm import rms_norm

TARGETS = torch.tensor([1, 0, 5, 3])


def attend(x):
    return flash_attention(x, x.sin(), x.cos(), is_causal=True)


def attend_by_operator(x):
    return FlashAttentionTriton.apply(x, x.sin(), x.cos(), True)


def attend_exactly(x):
    return attention(x, x.sin(), x.cos(), is_causal=True)[0]


# For each: the function of x, the same in plain differentiable PyTorch, and x's shape.
OPERATIONS = {
    "attention": (attend, attend_exactly, (1, 2, 6, 8)),
    "attention's operator": (attend_by_operator, attend_exactly, (1, 2, 6, 8)),
    "rms_norm": (
        lambda x: rms_norm(x, x[0].detach() + 1),
        lambda x: F.rms_norm(x, (8,), x[0].detach() + 1, 1e-5),
        (4, 8),
    ),
    "linear_cross_entropy": (
        lambda x: linear_cross_entropy(x, x.repeat(2, 1).sin(), TARGETS),
        lambda x: F.cross_entropy(F.linear(x, x.repeat(2, 1).sin()), TARGETS),
        (4, 8),
    ),
}


@pytest.fixture
def kernels(monkeypatch):
    """Runs the code path of the kernels on a CPU, with the oracle instead of the kernels."""

    def forward(q, k, v, is_causal, scale, window, cu_seqlens):
        return attention(q, k, v, is_causal=is_causal, scale=scale)

    def backward(grad, q, k, v, o, lse, is_causal, scale, window, cu_seqlens):
        return reference._ReferenceBackward.forward(None, grad, q, k, v, o, lse, is_causal, scale)

    stub = SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setattr(attention_package.operator, "kernels", lambda: stub)
    # float64, for an exact comparison
    monkeypatch.setattr(attention_package, "_check_types", lambda *given: None)


def gradient_penalty(function, x, incoming):
    """Returns the gradient of a loss that contains the norm of a gradient, and x directly."""
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, incoming(y), create_graph=True)
    (result,) = torch.autograd.grad(dx.square().sum() + x.sum(), x)
    return dx.detach(), result


@pytest.mark.parametrize("incoming", [torch.ones_like, lambda y: torch.ones_like(y) * y.mean()])
@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_are_right_or_raise(name, incoming, kernels, monkeypatch):
    ours, plain, shape = OPERATIONS[name]
    if name == "attention's operator":
        monkeypatch.setattr(attention_package, "_has_kernels", lambda device: True)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    expected = gradient_penalty(plain, x, incoming)
    try:
        found = gradient_penalty(ours, x, incoming)
    except RuntimeError as error:
        assert "second derivative" in str(error)
        (dx,) = torch.autograd.grad(ours(x), x, incoming(plain(x)).detach())
        torch.testing.assert_close(dx, expected[0])
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_types_are_refused_on_the_cpu(dtype):
    q = torch.ones(1, 2, 4, 8).to(dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        flash_attention(q, q, q)
    with pytest.raises(ValueError, match=str(dtype)):
        flash_attention(torch.ones(q.shape), q, q)
    for x, weight in ((q, torch.ones(8)), (torch.ones(4, 8), q[0, 0, 0])):
        with pytest.raises(ValueError, match=str(dtype)):
            rms_norm(x, weight)
    with pytest.raises(ValueError, match=str(dtype)):
        linear_cross_entropy(q[0, 0], q[0, 0], TARGETS)


def test_attention_on_the_cpu_follows_autocast():
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        ours = flash_attention(q, k.half(), v, is_causal=True)
        torchs = F.scaled_dot_product_attention(q, k.half(), v, is_causal=True)
    assert ours.dtype == torchs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, torchs, atol=0.02, rtol=0.02)
    ours.sum().backward()
    assert q.grad.dtype == torch.float32


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)

import torch
from stepgauge.kernels.adamw import FusedAdamW
from stepgauge.kernels.attention import FlashAttentionTriton, flash_attention
from stepgauge.kernels.rms_norm import RMSNormTriton, rms_norm

x = torch.randn(1, 2, 20, 16)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
torch.testing.assert_close(flash_attention(x, x, x, is_causal=True), expected)
assert rms_norm(x, torch.ones(16)).shape == x.shape
for function, inputs in ((FlashAttentionTriton, (x, x, x)), (RMSNormTriton, (x, torch.ones(16)))):
    try:
        function.apply(*inputs)
    except ValueError as error:
        assert "triton" in str(error)
    else:
        raise SystemExit(f"{function} raised no ValueError")
parameter = torch.nn.Parameter(torch.ones(3))
parameter.grad = torch.ones(3)
FusedAdamW([parameter], lr=0.5).step()
assert (parameter < 0.6).all()
"""


def test_without_triton_the_public_functions_run():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, env=environment)
