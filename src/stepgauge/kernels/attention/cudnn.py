"""Attention by torch's cuDNN (libraries.py says for which shapes). Heads between two widths of cuDNN's
are padded with zeros.

STEPGAUGE_CUDNN=0 and `torch.backends.cuda.enable_cudnn_sdp(False)` leave it out.
docs/log/2026-11-22-handed-over.md has what was weighed.
"""

import functools
import os

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, cudnn_sdp_enabled

TITLE = "cuDNN"
OPT_OUT = "STEPGAUGE_CUDNN"
WIDTHS = (64, 128, 256)


def is_allowed():
    return os.environ.get(OPT_OUT) != "0" and cudnn_sdp_enabled()


def refusal(passes, key, cu_seqlens, q, k, v, *others):
    """Why torch's own choice would not offer cuDNN the tensors, or None."""
    q, k, v = _padded(q, k, v)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(passes == "backward") for x in (q, k, v)]
        is_grouped = q.shape[1] != k.shape[1]
        params = SDPAParams(*leaves, None, 0.0, key.is_causal, is_grouped)
        takes = can_use_cudnn_attention(params, False)
    return None if takes else "torch does not give this shape to cuDNN"


def forward(key, cu_seqlens, q, k, v):
    q, k, v = _padded(q, k, v)
    try:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, key.is_causal, False, scale=key.scale
        )
    except RuntimeError as error:
        return _none_without_a_plan(error)
    return _as_promised(o, key.q), lse.reshape(key.q.shape[:3])


def backward(key, cu_seqlens, q, k, v, do, o, lse):
    q, k, v, do, o = _padded(q, k, v, do, o)
    # cuDNN's plans are kept by the strides of q, k and v alone: those of o and do must follow.
    strides = _strides_like(q.shape, q.stride())
    o, do = (_laid_out(x.to(q.dtype), strides) for x in (o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    try:
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, key.is_causal, scale=key.scale,
        )  # fmt: skip
    except RuntimeError as error:
        return _none_without_a_plan(error)
    return tuple(map(_as_promised, grads, (key.q, key.k, key.v)))


def backward_bytes(q, k):
    """dq in fp32, a number a row, and copies of narrower heads."""
    columns, copies = _width(q.shape[3]), 0
    if columns != q.shape[3]:  # q, do, o and dq; k, v, dk and dv
        rows = 4 * (q[..., 0].numel() + k[..., 0].numel())
        copies = rows * columns * q.element_size()
    return 4 * q[..., 0].numel() * (columns + 1) + copies


def _none_without_a_plan(error):
    if "cudnn" not in str(error).lower():
        raise error


def _width(head_width):
    return next(width for width in WIDTHS if width >= head_width)


def _padded(*tensors):
    """With zeros behind each head, up to cuDNN's next width: they add nothing to a score or to an
    output.
    """
    width = tensors[0].shape[-1]
    columns = _width(width) - width
    return [F.pad(x, (0, columns)) if columns else x for x in tensors]


def _as_promised(x, view):
    """As wide as the viewed tensor, and as `empty_like` of it lies: what the operators promise."""
    x = x if x.shape[3] == view.shape[3] else x[..., : view.shape[3]]
    return _laid_out(x, _strides_like(view.shape, view.stride))


@functools.lru_cache(maxsize=512)
def _strides_like(shape, strides):
    """Of `empty_like` of such a tensor."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _laid_out(x, strides):
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)
