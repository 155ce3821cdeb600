"""Runs small eager attention in torch's scaled_dot_product_attention.

A small call is limited by its launch, and torch's C++ operator costs the host less than our Python.
Torch chooses between FlashAttention-2 and cuDNN.

Legend: B batch, H heads, T tokens, D head width.
"""

import os

import torch
import torch.nn.functional as F

from . import heuristics

TITLE = "torch's scaled_dot_product_attention, its backward too"
IS_ALLOWED = os.environ.get("STEPGAUGE_ATTENTION_BY_TORCH") != "0"
# The largest B H T^2 D that runs in torch: that of model size "small" at batch 4, length 512. There
# the host of an H200 saves 0.29 ms per layer, forward and backward
# (docs/log/2026-11-23-launches.md).
MOST_PRODUCTS = 4 * 12 * 512**2 * 64
_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 8  # torch pads head widths that are no multiple of this


def takes(q, k, v, scale, window, cu_seqlens):
    """True if torch computes this call. q must be transposed from (B, T, H, D) in memory, as a
    network's projections leave it, because torch's result always has that order, while ours has the
    order of q. With one head the two orders are the same.
    """
    batch, heads, length, width = q.shape
    _, of_head, of_token, _ = q.stride()
    return (
        0 < batch * heads * length * length * width <= MOST_PRODUCTS
        and IS_ALLOWED
        and q.is_cuda
        and q.dtype in _DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape == k.shape == v.shape
        and (heads == 1 or of_head <= of_token)
        and width % _STEP == 0
        and width <= heuristics.MAX_HEAD_WIDTH  # wider heads must raise at every length
        and scale is None
        and not window
        and cu_seqlens is None
        and torch.backends.cuda.flash_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def attention(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
