"""Attention within sequences of different lengths that are packed one after another.

Legend: T tokens of all sequences, S sequences, H query heads, K key heads, D head width.
"""

import torch
from torch import Tensor

from . import attend


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`flash_attention` in which a token sees keys of its own sequence only: the scores are
    block-diagonal, and tiles outside of the blocks are neither read nor computed.

    Shapes: q (T, H, D), k and v (T, K, D), H a multiple of K; cu_seqlens (S + 1,) int32 or int64 on
    the same device, 0 then the end of each sequence (torch.cumsum of their lengths). Tokens after
    the last end are a sequence of their own, so that padded batches need no other shape. Returns o
    (T, H, D). The other terms are those of `flash_attention`.

    Raises ValueError for shapes and types that it does not take, and on the CPU for cu_seqlens that
    do not begin with 0, fall, or pass T; on a GPU looking at them would wait for it.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"flash_attention_varlen takes (T, H, D) of one T, not q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    _check_cu_seqlens(cu_seqlens, q)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = attend(q, k, v, is_causal, scale, window, cu_seqlens.int())
    return o[0].transpose(0, 1)


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens {tuple(cu_seqlens.shape)}: accepted is (S + 1,), at least 2 numbers"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} on {cu_seqlens.device}: "
            f"accepted is int32 or int64 on {q.device}"
        )
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type != "cpu":
        return
    if torch.compiler.is_compiling():
        return
    numbers = cu_seqlens.tolist()
    if numbers[0] != 0 or numbers != sorted(numbers) or numbers[-1] > q.shape[0]:
        raise ValueError(
            f"cu_seqlens {numbers}: accepted are numbers from 0 that do not fall, "
            f"up to {q.shape[0]} tokens"
        )
