"""The custom operators of attention, for torch.compile, fake tensors and FLOP counters."""

import functools

import torch
from torch.utils.flop_counter import register_flop_formula

from .reference import NO_SECOND_DERIVATIVE
from .visible import num_pairs


@functools.cache
def kernels():
    # Imported here, so that importing the package neither needs triton nor pays for its import.
    from . import triton

    return triton


def forward(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    return kernels().forward(q, k, v, is_causal, scale, window, cu_seqlens)


def backward(grad_o, q, k, v, o, lse, is_causal, scale, window=0, cu_seqlens=None):
    return kernels().backward(grad_o, q, k, v, o, lse, is_causal, scale, window, cu_seqlens)


# The results depend only on the order of an input's dimensions, not on its exact strides, so
# Inductor need not copy views.
_DECLARED = {"mutates_args": (), "tags": (torch.Tag.needs_fixed_stride_order,)}
_OPTIONS = "bool is_causal, float scale, int window=0, Tensor? cu_seqlens=None"
_forward_op = torch.library.custom_op(
    "stepgauge::flash_attention",
    forward,
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    **_DECLARED,
)
_backward_op = torch.library.custom_op(
    "stepgauge::flash_attention_backward",
    backward,
    schema="(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    **_DECLARED,
)


def _setup(ctx, inputs, output):
    q, k, v, ctx.is_causal, ctx.scale, ctx.window, cu_seqlens = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, *(() if cu_seqlens is None else (cu_seqlens,)))
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradient of lse


def _differentiate(ctx, grad_o, grad_lse):
    if grad_o is None:
        return (None,) * 7
    q, k, v, o, lse, *cu_seqlens = ctx.saved_tensors
    options = ctx.is_causal, ctx.scale, ctx.window, *(cu_seqlens or (None,))
    return *_backward_op(grad_o, q, k, v, o, lse, *options), *(None,) * len(options)


def _refuse(ctx, *grads):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


_forward_op.register_autograd(_differentiate, setup_context=_setup)
_backward_op.register_autograd(_refuse)


@_forward_op.register_fake
def _(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward_op.register_fake
def _(grad_o, q, k, v, o, lse, is_causal, scale, window=0, cu_seqlens=None):
    return _like(q), _like(k), _like(v)


def _like(x):
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous())


# FLOPs follow torch's formula for its own attention, so that both give a model the same count: all
# scores even if causal, two matrix products forward and five backward (one recomputes the scores).
# A window and packed sequences count only the scores within them.
def _flops_of_scores(q, k, is_causal, scale, window=0, cu_seqlens=None):
    pairs = num_pairs(q.shape[2], k.shape[2], is_causal, window, cu_seqlens)
    return 2 * q.numel() // max(1, q.shape[2]) * pairs


@register_flop_formula(torch.ops.stepgauge.flash_attention, get_raw=True)
def _(q, k, v, *options, out_val=None, **named):
    return 2 * _flops_of_scores(q, k, *options, **named)


@register_flop_formula(torch.ops.stepgauge.flash_attention_backward, get_raw=True)
def _(grad_o, q, k, v, o, lse, *options, out_val=None, **named):
    return 5 * _flops_of_scores(q, k, *options, **named)
