"""FlashAttention-2, which never holds the score matrix: as a function, as two autograd functions
and as a custom operator.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width; `...` any leading
dimensions.

    flash_attention(q, k, v, *, is_causal, scale, window)   the public function, on (B, H, T, D)
    flash_attention_varlen(q, k, v, cu_seqlens)             for packed sequences, (T, H, D)
    FlashAttentionTriton.apply(q, k, v, is_causal)          on (..., T, D), CUDA
    FlashAttentionReference.apply(q, k, v, is_causal)       the same in plain PyTorch, any device
    torch.ops.stepgauge.flash_attention                     what torch.compile and fake tensors see
"""

import importlib.util
import math
import os

import torch

from stepgauge.kernels.plain_eager import is_plain_eager

from . import by_torch, heuristics, libraries, operator
from .reference import FlashAttentionReference, attention
from .visible import check_window

__all__ = [
    "FlashAttentionReference",
    "FlashAttentionTriton",
    "attention",
    "flash_attention",
    "flash_attention_varlen",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def flash_attention(q, k, v, *, is_causal=False, scale=None, window=0):
    """Returns `softmax(scale q k^T) v`, computed by FlashAttention-2 (Dao 2023): neither forward
    nor backward holds the score matrix.

    Shapes: q (B, H, T_q, D), k and v (B, K, T_k, D) with H a multiple of K (grouped-query heads:
    query head h reads key head h // (H / K)); returns o (B, H, T_q, D) in q's type and order of
    dimensions. D up to 256, any lengths. Types: float32, bfloat16, float16, accumulated in float32;
    float32 products are exact to float32 rounding unless `torch.backends.cuda.matmul.allow_tf32`.
    `scale` is 1/sqrt(D) if None. Under autocast inputs are cast as scaled_dot_product_attention
    casts them.

    Causal: query i sees key j when i >= j, both counted from the first. If T_q != T_k, the mask is
    aligned to the upper left corner, like torch's `is_causal`; the flash-attn package aligns it to
    the lower right one.

    With a `window` of W, query i sees keys i - W + 1 to i if causal, and i - W + 1 to i + W - 1
    otherwise. The flash-attn package calls these window_size=(W - 1, 0) and (W - 1, W - 1). Tiles
    outside the window are neither read nor computed. 0 means no window. Windows run in the portable
    Triton kernels, not in the Gluon kernels for Hopper.

    On Hopper, cuDNN and (if installed) FlashAttention-4 run the shapes for which they were measured
    faster (libraries.py); STEPGAUGE_CUDNN=0 and STEPGAUGE_FA4=0 turn them off. The kernels here sum
    in a fixed order, so gradients are bitwise reproducible. The libraries' are not, so they are not
    used under `torch.use_deterministic_algorithms(True)`.

    Small eager calls run in torch's scaled_dot_product_attention (by_torch.py), which costs the
    host less, if q, k and v are transposed from (B, T, H, D) in memory, as in a network. It is not
    used with STEPGAUGE_ATTENTION_BY_TORCH=0, a `scale`, a window or deterministic algorithms.

    Without CUDA (and outside Triton's interpreter) a plain PyTorch version runs, which also accepts
    float64. Raises ValueError for unsupported shapes, types, scales or windows, and RuntimeError
    for a second derivative.
    """
    return attend(q, k, v, is_causal, scale, window)


def attend(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    """`flash_attention`, within packed sequences if `cu_seqlens` are passed (packed.py)."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"flash_attention takes (B, H, T, D), not q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    has_kernels = _has_kernels(q.device)
    if has_kernels and is_plain_eager(q):
        if by_torch.takes(q, k, v, scale, window, cu_seqlens):
            libraries.calls["forward", "torch"] += 1
            return by_torch.attention(q, k, v, is_causal)
        return FlashAttentionTriton.apply(q, k, v, is_causal, scale, window, cu_seqlens)
    scale = _check(q, k, v, scale)
    check_window(q.shape[2], k.shape[2], window)
    if not has_kernels:
        return _in_plain_pytorch(q, k, v, is_causal, scale, window, cu_seqlens)
    q, k, v = _autocast(q, k, v)
    _check_types(q, k, v, _DTYPES)
    inputs = q, k, v, is_causal, scale, window, cu_seqlens
    return torch.ops.stepgauge.flash_attention(*inputs)[0]


def _in_plain_pytorch(q, k, v, is_causal, scale, window, cu_seqlens):
    """Runs FlashAttention-2 in plain PyTorch, which also accepts float64."""
    device = q.device.type
    q, k, v = _autocast(q, k, v)
    _check_types(q, k, v, (*_DTYPES, torch.float64))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return FlashAttentionReference.apply(q, k, v, is_causal, scale, window, cu_seqlens)
    with torch.autocast(device, enabled=False):
        return FlashAttentionReference.apply(q, k, v, is_causal, scale, window, cu_seqlens)


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 in Triton: `.apply(q, k, v, is_causal=False, scale=None, window=0)`.

    q (..., T_q, D), k and v (..., T_k, D) with the same leading dimensions; with grouped heads, q's
    last leading dimension is a multiple of k's. Returns o (..., T_q, D). Saves q, k, v, o and the
    fp32 log-sum-exp (..., T_q) for backward. Everything else is as in `flash_attention`.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None, window=0, cu_seqlens=None):
        scale = _check(q, k, v, scale)
        check_window(q.shape[-2], k.shape[-2], window)
        q, k, v = _autocast(q, k, v)
        _check_types(q, k, v, _DTYPES)
        if not _has_kernels(q.device):
            raise ValueError(
                f"FlashAttentionTriton runs on CUDA tensors with triton installed, not on {q.device}"
            )
        inputs = _four_dims(q), _four_dims(k), _four_dims(v), is_causal, scale
        if is_plain_eager(q):
            o, lse = operator.kernels().forward(*inputs, window, cu_seqlens)
        else:
            o, lse = torch.ops.stepgauge.flash_attention(*inputs, window, cu_seqlens)
        if q.ndim != 4:
            o, lse = o.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse, *(() if cu_seqlens is None else (cu_seqlens,)))
        ctx.is_causal, ctx.scale, ctx.window = is_causal, scale, window
        return o

    @staticmethod
    def backward(ctx, grad_o):
        q, k, v, o, lse, *rest = ctx.saved_tensors
        cu_seqlens = rest[0] if rest else None
        # With create_graph, call the operator, because it raises for a second derivative.
        by_operator = torch.is_grad_enabled() or not is_plain_eager(q)
        run = torch.ops.stepgauge.flash_attention_backward if by_operator else operator.backward
        tensors = [_four_dims(x) for x in (grad_o, q, k, v, o)]
        options = ctx.is_causal, ctx.scale, ctx.window, cu_seqlens
        no_grads = (None,) * len(options)
        if q.ndim == 4:
            return *run(*tensors, lse, *options), *no_grads
        dq, dk, dv = run(*tensors, lse.view(tensors[1].shape[:3]), *options)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), *no_grads


def _has_kernels(device):
    return _HAS_TRITON and (_INTERPRET or device.type in ("cuda", "meta"))


def _autocast(*tensors):
    """Casts the tensors as autocast does for scaled_dot_product_attention, which leaves float64
    unchanged.
    """
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def _four_dims(x):
    """Returns (..., T, D) as (B, H, T, D), as a view if the strides allow it."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.reshape(-1, *x.shape[-3:])


def _check(q, k, v, scale):
    """Returns the scale to use. Raises ValueError for shapes that do not fit and for a scale that
    is not positive and finite.
    """
    if q.ndim < 2 or q.ndim != k.ndim or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q (..., T_q, D) "
            "and k, v both of shape (..., T_k, D)"
        )
    if (
        q.ndim > 2
        and q.shape[:-2] != k.shape[:-2]
        and (  # most models have equal shapes and skip these slower comparisons
            q.shape[:-3] != k.shape[:-3] or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] != 0
        )
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}: the leading dimensions must be equal, except "
            "that the number of q's heads may be a multiple of k's (grouped heads)"
        )
    if k.shape[-2] == 0:
        raise ValueError(f"k {tuple(k.shape)} has no keys: softmax needs at least 1")
    if not 1 <= q.shape[-1] <= heuristics.MAX_HEAD_WIDTH:
        raise ValueError(f"head width {q.shape[-1]}: accepted are 1 to {heuristics.MAX_HEAD_WIDTH}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale {scale}: expected a positive, finite number "
            "(the row maximum is taken before scaling)"
        )
    return scale


def _check_types(q, k, v, accepted):
    if q.dtype not in accepted or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"types q {q.dtype}, k {k.dtype}, v {v.dtype}: all three must have the same type, "
            f"one of {accepted}"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}: all three must be on one device"
        )


from .packed import flash_attention_varlen  # noqa: E402 - it imports `attend`
