"""Calls of single operations with given sizes.

Operands rotate through more memory than a GPU's caches hold, as in a step.

Legend: M rows (tokens), N columns, K summed dimension, V vocabulary, H heads times batch, T sequence,
D head width, E experts.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.calibrate import passes
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.operator_calls import call_of
from stepgauge.models.parts import ATTENTIONS, OPTIMIZERS
from stepgauge.runtime.recording import Call
from stepgauge.spec.calibration import FULL_MASK

EMBEDDING_ROWS = 1000
STRIDED_WIDTH = 2048
CACHE_BYTES = 128 * 2**20  # more than the L2 cache of any current GPU (H100: 50 MB)
MOST_COPIES = 24


def rotating(make: Callable[[], tuple[Any, ...]], call: Callable[..., object]) -> Call:
    """Returns a call that takes its operands in turn from more sets than a GPU's cache holds."""
    sets = [make()]
    on_gpu = [tensor for tensor in tensors_in(sets[0]) if tensor.is_cuda]
    if on_gpu:
        nbytes = sum(tensor.nbytes for tensor in on_gpu)
        enough = math.ceil(CACHE_BYTES / max(1, nbytes))
        sets += [make() for _ in range(min(MOST_COPIES, enough) - 1)]
    operands = itertools.cycle(sets)
    return lambda: call(*next(operands))


def matmul(
    layout: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    batch: tuple[int, ...] = (),
) -> Call:
    """Layouts: nt is a linear layer's forward, nn its input gradient, tn its weight gradient."""
    new = functools.partial(torch.randn, *batch, device=device, dtype=dtype)
    if layout == "nt":
        return rotating(lambda: (new(m, k), new(n, k)), lambda x, w: x @ w.mT)
    if layout == "nn":
        return rotating(lambda: (new(m, k), new(k, n)), lambda x, w: x @ w)
    return rotating(lambda: (new(k, m), new(k, n)), lambda x, w: x.mT @ w)


def batched_matmul(
    layout: str, dtype: torch.dtype, b: int, m: int, n: int, k: int, device: torch.device
) -> Call:
    return matmul(layout, dtype, m, n, k, device, batch=(b,))


def grouped_matmul(layout: str, e: int, m: int, n: int, k: int, device: torch.device) -> Call:
    """Products of e experts with equally many tokens each.

    Tokens are rows, except in the weight gradient (tn), which sums over them.
    """
    new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    tokens = k if layout == "tn" else m
    ends = torch.arange(1, e + 1, device=device, dtype=torch.int32) * (tokens // e)
    if layout == "nt":
        return rotating(
            lambda: (new(m, k), new(e, n, k)), lambda x, w: F.grouped_mm(x, w.mT, offs=ends)
        )
    if layout == "nn":
        return rotating(
            lambda: (new(m, k), new(e, k, n)), lambda x, w: F.grouped_mm(x, w, offs=ends)
        )
    return rotating(lambda: (new(k, m), new(k, n)), lambda x, w: F.grouped_mm(x.mT, w, offs=ends))


def traffic(nbytes: int, device: torch.device) -> Call:
    """Reads half of the bytes and writes the other half, as elementwise operations do.

    On a CPU it writes to new memory, whose pages cost as much as the pass. On a GPU, new memory comes
    from the caching allocator.
    """
    new = functools.partial(torch.randn, max(1, nbytes // 8), device=device)
    if device.type == "cpu":
        return rotating(lambda: (new(),), lambda source: source * 2.0)
    return rotating(
        lambda: (new(), new()), lambda source, target: torch.mul(source, 2.0, out=target)
    )


def cast(source: torch.dtype, target: torch.dtype, numel: int, device: torch.device) -> Call:
    return rotating(lambda: (torch.randn(numel, device=device).to(source),), lambda x: x.to(target))


def gradient_sum(dtype: torch.dtype, numel: int, device: torch.device) -> Call:
    """Adds a gradient to that of earlier passes, in place."""
    new = functools.partial(torch.randn, numel, device=device, dtype=dtype)
    return rotating(lambda: (new(), new()), lambda total, gradient: total.add_(gradient))


def strided_copy(numel: int, device: torch.device) -> Call:
    """Copies a tensor with its two outer dimensions swapped; rows stay contiguous."""
    rows = max(2, numel // STRIDED_WIDTH) // 2
    new = functools.partial(torch.randn, 2, rows, min(numel, STRIDED_WIDTH), device=device)
    return rotating(lambda: (new(dtype=torch.bfloat16),), lambda x: x.transpose(0, 1).contiguous())


def eager_pass(
    name: str, is_backward: bool, dtype: torch.dtype, m: int, n: int, device: torch.device
) -> Call:
    make = functools.partial(passes.operands, name, dtype, m, n, device)
    return rotating(make, functools.partial(passes.run, name, is_backward))


def compiled_pass(name: str, is_backward: bool, m: int, n: int, device: torch.device) -> Call:
    """Under autocast, with bf16 branches."""
    make = functools.partial(passes.operands, name, torch.bfloat16, m, n, device, compiled=True)
    return rotating(make, functools.partial(passes.run, name, is_backward, compiled=True))


def residual(numel: int, device: torch.device) -> Call:
    new = functools.partial(torch.randn, numel, device=device)
    return rotating(lambda: (new(), new(dtype=torch.bfloat16)), passes.residual)


def norm(
    name: str, is_backward: bool, dtype: torch.dtype, m: int, n: int, device: torch.device
) -> Call:
    normalise = F.rms_norm if name == "rmsnorm" else F.layer_norm

    def make() -> tuple[Tensor, ...]:
        x = torch.randn(m, n, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(n, device=device, dtype=dtype, requires_grad=True)
        y = normalise(x, (n,), weight, eps=1e-5)
        return x, weight, y, torch.randn_like(y)

    def backward(x: Tensor, weight: Tensor, y: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(y, (x, weight), grad, retain_graph=True)

    def forward(x: Tensor, weight: Tensor, y: Tensor, grad: Tensor) -> object:
        with torch.no_grad():
            return normalise(x, (n,), weight, eps=1e-5)

    return rotating(make, backward if is_backward else forward)


def loss(is_backward: bool, autocasts: bool, m: int, v: int, device: torch.device) -> Call:
    """Cross-entropy of fp32 logits, or of bf16 logits under autocast."""
    dtype = torch.bfloat16 if autocasts else torch.float32

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocasts):
            return F.cross_entropy(logits, targets)

    def make() -> tuple[Tensor, ...]:
        logits = torch.randn(m, v, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(v, (m,), device=device)
        return logits, targets, mean_loss(logits, targets)

    def backward(logits: Tensor, targets: Tensor, loss: Tensor) -> object:
        return torch.autograd.grad(loss, logits, retain_graph=True)

    def forward(logits: Tensor, targets: Tensor, loss: Tensor) -> object:
        return mean_loss(logits.detach(), targets)

    return rotating(make, backward if is_backward else forward)


def embedding_backward(m: int, n: int, device: torch.device) -> Call:
    """The gradient of an embedding with few rows, so that the sum over tokens dominates."""

    def make() -> tuple[Tensor, ...]:
        tokens = torch.randint(EMBEDDING_ROWS, (m,), device=device)
        return torch.randn(m, n, device=device), tokens

    def backward(grad: Tensor, tokens: Tensor) -> object:
        return torch.ops.aten.embedding_dense_backward(
            grad, tokens, EMBEDDING_ROWS, -1, scale_grad_by_freq=False
        )

    return rotating(make, backward)


def attention(
    name: str, is_backward: bool, dtype: torch.dtype, h: int, t: int, d: int, device: torch.device
) -> Call:
    """Attention of h heads without grouped keys; causal unless the name ends in "-full".

    The heads of a position are contiguous, as the product before attention writes them.
    """
    # An explicit scale keeps small shapes on our kernels, as in compiled networks
    # (kernels/attention/by_torch.py).
    computed_by = name.removesuffix(FULL_MASK)
    scale = {"scale": d**-0.5} if computed_by == "triton" else {}
    is_causal = computed_by == name
    attend = functools.partial(ATTENTIONS[computed_by], is_causal=is_causal, **scale)

    def make() -> tuple[Tensor, ...]:
        new = functools.partial(torch.randn, 1, t, h, d, device=device, dtype=dtype)
        q, k, v = (new(requires_grad=True).transpose(1, 2) for _ in range(3))
        o = attend(q, k, v)
        return q, k, v, o, torch.randn_like(o)

    def backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)

    def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, grad: Tensor) -> object:
        with torch.no_grad():
            return attend(q, k, v)

    return rotating(make, backward if is_backward else forward)


def optimizer(
    name: str, dtype: torch.dtype, numel: int, device: torch.device, **settings: bool
) -> Call:
    """One optimizer step over `numel` parameters in tensors of at most 2^24 elements."""
    sizes = [2**24] * (numel // 2**24) + [numel % 2**24]
    parameters = [
        torch.zeros(size, device=device, dtype=dtype).requires_grad_() for size in sizes if size
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    # torch refuses to capture a step without `capturable`. Its fused kernel is the same with it.
    if name == "adamw" and device.type == "cuda":
        settings["capturable"] = True
    return OPTIMIZERS[name](parameters, lr=1e-4, **settings).step


def traced_call(text: str, device: torch.device) -> Call:
    operands, operator = call_of(text, device)
    return rotating(operands, lambda args, kwargs: operator(*args, **kwargs))
