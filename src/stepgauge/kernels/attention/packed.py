"""Attention within sequences of different lengths that are packed into one tensor.

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
    """Runs `flash_attention` with each token seeing only keys of its own sequence. The scores are
    block-diagonal; tiles outside the blocks are neither read nor computed.

    Shapes: q (T, H, D), k and v (T, K, D), H a multiple of K. cu_seqlens (S + 1,) is int32 or int64
    on the same device and holds 0, then the end of each sequence (torch.cumsum of their lengths).
    Tokens after the last end form one more sequence, so that a padded batch keeps its shape.
    Returns o (T, H, D). Everything else is as in `flash_attention`.

    Raises ValueError for unsupported shapes and types. On the CPU it also raises ValueError for
    cu_seqlens that do not begin with 0, that decrease, or that exceed T; on a GPU this check would
    have to wait for the GPU.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[0] != q.shape[0]:
        raise ValueError(
            "flash_attention_varlen takes q, k, v of shape (T, H, D) with the same T, not "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    _check_cu_seqlens(cu_seqlens, q)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = attend(q, k, v, is_causal, scale, window, cu_seqlens.int())
    return o[0].transpose(0, 1)


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: expected (S + 1,), at least 2 numbers"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} on {cu_seqlens.device}: "
            f"expected int32 or int64 on {q.device}"
        )
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type != "cpu":
        return
    if torch.compiler.is_compiling():
        return
    numbers = cu_seqlens.tolist()
    if numbers[0] != 0 or numbers != sorted(numbers) or numbers[-1] > q.shape[0]:
        raise ValueError(
            f"cu_seqlens {numbers}: expected numbers that begin with 0, do not decrease and do not "
            f"exceed {q.shape[0]} (the number of tokens)"
        )
