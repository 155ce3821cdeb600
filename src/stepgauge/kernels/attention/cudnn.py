"""Attention by cuDNN through torch's operators; libraries.py lists the shapes. Heads are padded
with zeros to the next of WIDTHS.

STEPGAUGE_CUDNN=0 and `torch.backends.cuda.enable_cudnn_sdp(False)` turn it off.
docs/log/2026-11-22-handed-over.md has the reasons.
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
    """Returns why torch would not run these tensors in cuDNN, or None if it would."""
    q, k, v = _padded(q, k, v)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(passes == "backward") for x in (q, k, v)]
        is_grouped = q.shape[1] != k.shape[1]
        params = SDPAParams(*leaves, None, 0.0, key.is_causal, is_grouped)
        is_supported = can_use_cudnn_attention(params, False)
    return None if is_supported else "torch does not run this shape in cuDNN"


def forward(key, cu_seqlens, q, k, v):
    q, k, v = _padded(q, k, v)
    try:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, key.is_causal, False, scale=key.scale
        )
    except RuntimeError as error:
        return _none_if_unsupported(error)
    return _restore_layout(o, key.q), lse.reshape(key.q.shape[:3])


def backward(key, cu_seqlens, q, k, v, do, o, lse):
    q, k, v, do, o = _padded(q, k, v, do, o)
    # torch caches cuDNN's plans by the strides of q, k and v only, so o and do need strides that
    # follow q's.
    strides = _strides_like(q.shape, q.stride())
    o, do = (_with_strides(x.to(q.dtype), strides) for x in (o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    try:
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, key.is_causal, scale=key.scale,
        )  # fmt: skip
    except RuntimeError as error:
        return _none_if_unsupported(error)
    return tuple(map(_restore_layout, grads, (key.q, key.k, key.v)))


def backward_bytes(q, k):
    """Returns the temporary bytes of backward: dq in fp32, one number per row, and padded
    copies.
    """
    columns, copies = _width(q.shape[3]), 0
    if columns != q.shape[3]:  # copies of q, do, o and dq, and of k, v, dk and dv
        rows = 4 * (q[..., 0].numel() + k[..., 0].numel())
        copies = rows * columns * q.element_size()
    return 4 * q[..., 0].numel() * (columns + 1) + copies


def _none_if_unsupported(error):
    """Returns None if cuDNN raised the error (it has no plan for the shape); raises it
    otherwise.
    """
    if "cudnn" not in str(error).lower():
        raise error


def _width(head_width):
    return next(width for width in WIDTHS if width >= head_width)


def _padded(*tensors):
    """Pads each head with zeros to cuDNN's next width; they add nothing to scores or outputs."""
    width = tensors[0].shape[-1]
    columns = _width(width) - width
    return [F.pad(x, (0, columns)) if columns else x for x in tensors]


def _restore_layout(x, view):
    """Cuts x to the head width of the viewed tensor and gives it the strides of its `empty_like`,
    as the custom operators' fake versions declare.
    """
    x = x if x.shape[3] == view.shape[3] else x[..., : view.shape[3]]
    return _with_strides(x, _strides_like(view.shape, view.stride))


@functools.lru_cache(maxsize=512)
def _strides_like(shape, strides):
    """Returns the strides that `empty_like` gives for a tensor of this shape and these strides."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _with_strides(x, strides):
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)
