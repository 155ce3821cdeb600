"""Attention without the score matrix: FlashAttention-2 as a function, two autograd functions and a
custom operator.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width; `...` any leading
dimensions.

    flash_attention(q, k, v, *, is_causal, scale, window)   the public function, on (B, H, T, D)
    flash_attention_varlen(q, k, v, cu_seqlens)             of packed sequences, (T, H, D)
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
    """`softmax(scale q k^T) v` by FlashAttention-2 (Dao 2023): no score matrix is held, forward or
    backward.

    Shapes: q (B, H, T_q, D), k and v (B, K, T_k, D) with H a multiple of K (grouped-query heads:
    query head h reads key head h // (H / K)); returns o (B, H, T_q, D) in q's type and order of
    dimensions. D up to 256, any lengths. Types: float32, bfloat16, float16, accumulated in float32;
    float32 products are exact to float32 rounding unless `torch.backends.cuda.matmul.allow_tf32`.
    `scale` is 1/sqrt(D) if None. Under autocast inputs are cast as scaled_dot_product_attention
    casts them.

    Causal: query i sees key j when i >= j, both counted from the first, also where T_q != T_k: the
    upper left corner, as torch's `is_causal`, not the lower right one of FlashAttention's own
    package.

    A `window` of W lets query i see the W keys i - W + 1 to i where causal, and i - W + 1 to
    i + W - 1 otherwise: window_size=(W - 1, 0) and (W - 1, W - 1) of FlashAttention's package. Tiles
    outside of it are neither read nor computed. 0: none. Hopper's kernels in Gluon leave it to the
    portable ones.

    On Hopper FlashAttention-4, where it is installed, and cuDNN run the shapes where they were measured
    faster (libraries.py); STEPGAUGE_FA4=0 and STEPGAUGE_CUDNN=0 leave them out. The kernels here make
    their sums in a fixed order, so that gradients have the same bits every time; libraries do not, and
    are left out under `torch.use_deterministic_algorithms(True)`.

    Small eager calls whose tokens lie outside of heads in memory, as a network's do, run in torch's
    scaled_dot_product_attention (by_torch.py), which the host launches faster; STEPGAUGE_ATTENTION_BY_TORCH=0,
    a `scale`, a window or deterministic algorithms keep the kernels here.

    Without CUDA (and outside of Triton's interpreter) the plain PyTorch version runs, which takes
    float64 too. Raises ValueError for shapes, types, a scale or a window that it does not take, and
    RuntimeError for a second derivative.
    """
    return attend(q, k, v, is_causal, scale, window)


def attend(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    """`flash_attention`, of packed sequences where there are `cu_seqlens` (packed.py)."""
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
    """FlashAttention-2 in PyTorch, with float64 as well; autocast has cast q, k and v by then."""
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
    """FlashAttention-2 in Triton: `.apply(q, k, v, is_causal=False, scale=None,
    window=0)`.

    q (..., T_q, D), k and v (..., T_k, D) with the same leading dimensions (the last of them may be
    grouped: q's a multiple of k's); returns o (..., T_q, D). Saves q, k, v, o and the fp32
    log-sum-exp (..., T_q), nothing else. Causal: query i sees key j when i >= j, both counted from
    the first. Other terms as in `flash_attention`.
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
        # With create_graph the operator is called: it refuses a second derivative.
        by_operator = torch.is_grad_enabled() or not is_plain_eager(q)
        run = torch.ops.stepgauge.flash_attention_backward if by_operator else operator.backward
        tensors = [_four_dims(x) for x in (grad_o, q, k, v, o)]
        options = ctx.is_causal, ctx.scale, ctx.window, cu_seqlens
        nothing = (None,) * len(options)
        if q.ndim == 4:
            return *run(*tensors, lse, *options), *nothing
        dq, dk, dv = run(*tensors, lse.view(tensors[1].shape[:3]), *options)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), *nothing


def _has_kernels(device):
    return _HAS_TRITON and (_INTERPRET or device.type in ("cuda", "meta"))


def _autocast(*tensors):
    """The tensors as autocast would hand them to scaled_dot_product_attention: float64 is left
    alone.
    """
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def _four_dims(x):
    """(..., T, D) as (B, H, T, D): a view wherever the leading dimensions allow it."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.reshape(-1, *x.shape[-3:])


def _check(q, k, v, scale):
    """The scale to use; ValueError for shapes that do not fit or a scale that is not positive."""
    if q.ndim < 2 or q.ndim != k.ndim or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: accepted are q (..., T_q, D) "
            "and k, v of one shape (..., T_k, D)"
        )
    if (
        q.ndim > 2
        and q.shape[:-2] != k.shape[:-2]
        and (  # equal in most models: then nothing more is looked at
            q.shape[:-3] != k.shape[:-3] or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] != 0
        )
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}: leading dimensions must be equal, but for the last of them, "
            "where q's may be a multiple of k's (grouped heads)"
        )
    if k.shape[-2] == 0:
        raise ValueError(
            f"k {tuple(k.shape)} has no keys: the softmax over none is not defined; at least 1 is needed"
        )
    if not 1 <= q.shape[-1] <= heuristics.MAX_HEAD_WIDTH:
        raise ValueError(f"head width {q.shape[-1]}: accepted are 1 to {heuristics.MAX_HEAD_WIDTH}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale {scale}: accepted are positive numbers (the row maximum is taken before scaling)"
        )
    return scale


def _check_types(q, k, v, accepted):
    if q.dtype not in accepted or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"types q {q.dtype}, k {k.dtype}, v {v.dtype}: accepted is one of {accepted} for all three"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"devices q {q.device}, k {k.device}, v {v.device}: one device for all three is needed"
        )


from .packed import flash_attention_varlen  # noqa: E402 - it builds on `attend`
