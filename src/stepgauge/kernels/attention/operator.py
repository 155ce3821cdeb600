"""The custom operators of attention: what compilers, fake tensors and FLOP counters see.

Defined on the library itself, with autograd's part as a function of its own: the Python layers of
torch.library.custom_op and register_autograd cost a call 3.5 µs of host time (torch 2.13). That takes
private names of the dispatcher. The way out: a register_autograd that costs less.
"""

import functools

import torch
from torch.utils.flop_counter import register_flop_formula

from .reference import NO_SECOND_DERIVATIVE
from .visible import num_pairs


@functools.cache
def kernels():
    # Late, so that importing this package neither needs triton nor pays for its import.
    from . import triton

    return triton


def forward(q, k, v, is_causal, scale, window=0, spans=None):
    return kernels().forward(q, k, v, is_causal, scale, window, spans)


def backward(grad_o, q, k, v, o, lse, is_causal, scale, window=0, spans=None):
    return kernels().backward(grad_o, q, k, v, o, lse, is_causal, scale, window, spans)


class _Differentiable(torch.autograd.Function):
    """The operator's autograd formula."""

    @staticmethod
    def forward(ctx, keys, *inputs):
        q, k, v, ctx.is_causal, ctx.scale, ctx.window, spans = inputs
        o, lse = _below_autograd(keys, *inputs)
        ctx.save_for_backward(q, k, v, o, lse, *(() if spans is None else (spans,)))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for lse
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        if grad_o is None:
            return (None,) * 8
        q, k, v, o, lse, *rest = ctx.saved_tensors
        spans = rest[0] if rest else None
        options = ctx.is_causal, ctx.scale, ctx.window, spans
        run = torch.ops.stepgauge.flash_attention_backward
        return None, *run(grad_o, q, k, v, o, lse, *options), *(None,) * len(options)


def _with_autograd(keys, q, k, v, is_causal, scale, window=0, spans=None):
    """The operator as autograd comes by, also where it has nothing to do: in a compiled graph."""
    options = is_causal, scale, window, spans
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Differentiable.apply(keys, q, k, v, *options)
    return _below_autograd(keys, q, k, v, *options)


class _BackwardOnce(torch.autograd.Function):
    """The backward operator under autograd, that is with create_graph."""

    @staticmethod
    def forward(ctx, keys, *inputs):
        keys = keys & torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.stepgauge.flash_attention_backward.default.redispatch(keys, *inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


_NOTHING_BUT_A_DEVICE = [
    torch._C.DispatchKeySet(key) for key in (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU)
]


def _below_autograd(keys, *inputs):
    keys = keys & torch._C._after_autograd_keyset
    # what the dispatcher would do next, without another round through it
    if keys in _NOTHING_BUT_A_DEVICE:
        return forward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.stepgauge.flash_attention.default.redispatch(keys, *inputs)


_LIBRARY = torch.library.Library("stepgauge", "FRAGMENT")
# What is returned depends on the order of an input's dimensions alone: Inductor need not copy views
# into their strides.
_LAYOUT = (torch.Tag.needs_fixed_stride_order,)
_LIBRARY.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool is_causal, float scale,"
    " int window=0, Tensor? spans=None) -> (Tensor o, Tensor lse)",
    tags=_LAYOUT,
)
_LIBRARY.define(
    "flash_attention_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool is_causal,"
    " float scale, int window=0, Tensor? spans=None) -> (Tensor, Tensor, Tensor)",
    tags=_LAYOUT,
)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("flash_attention", forward, _key)
    _LIBRARY.impl("flash_attention_backward", backward, _key)
_LIBRARY.impl("flash_attention", _with_autograd, "Autograd", with_keyset=True)
_LIBRARY.impl("flash_attention_backward", _BackwardOnce.apply, "Autograd", with_keyset=True)


@torch.library.register_fake("stepgauge::flash_attention")
def _(q, k, v, is_causal, scale, window=0, spans=None):
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("stepgauge::flash_attention_backward")
def _(grad_o, q, k, v, o, lse, is_causal, scale, window=0, spans=None):
    return _like(q), _like(k), _like(v)


def _like(x):
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous())


# Counted as torch counts its own attention, so that swapping one for the other leaves a model's
# count alone: every score, also when causal, two products forward and five backward (the second of
# the scores among them). Of a window and of packed sequences, the scores within.
def _flops_of_scores(q, k, is_causal, scale, window=0, spans=None):
    pairs = num_pairs(q.shape[2], k.shape[2], is_causal, window, spans)
    return 2 * q.numel() // max(1, q.shape[2]) * pairs


@register_flop_formula(torch.ops.stepgauge.flash_attention, get_raw=True)
def _(q, k, v, *options, out_val=None, **named):
    return 2 * _flops_of_scores(q, k, *options, **named)


@register_flop_formula(torch.ops.stepgauge.flash_attention_backward, get_raw=True)
def _(grad_o, q, k, v, o, lse, *options, out_val=None, **named):
    return 5 * _flops_of_scores(q, k, *options, **named)
