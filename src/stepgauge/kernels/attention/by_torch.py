"""Small eager attention by torch's scaled_dot_product_attention: where launches are all that counts, an
operator in C++ takes the host less time than what is written in Python here. Torch chooses whether
FlashAttention-2 or cuDNN runs.

Legend: B batch, H heads, T tokens, D head width.
"""

import os

import torch
import torch.nn.functional as F

from . import heuristics

TITLE = "torch's scaled_dot_product_attention, its backward too"
IS_ALLOWED = os.environ.get("STEPGAUGE_ATTENTION_BY_TORCH") != "0"
# The largest B H T^2 D that it takes, of the size small at 4 x 512. There one H200's host takes 0.29 ms
# less a layer for forward and backward (docs/log/2026-11-23-launches.md).
MOST_PRODUCTS = 4 * 12 * 512**2 * 64
_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 8  # head widths that need no padding


def takes(q, k, v, scale, window, cu_seqlens):
    """True if torch computes this call. Tokens must be outside of heads in memory, as a network's
    projections leave them: torch's result has that order, ours the order of q. One head has both.
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
        and width <= heuristics.MAX_HEAD_WIDTH  # wider ones are refused, whatever their length
        and scale is None
        and not window
        and cu_seqlens is None
        and torch.backends.cuda.flash_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def attention(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
