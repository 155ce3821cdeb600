"""The mean of a tensor and of what came from peers, in one pass: each value is read once, the mean
is written once.

A part of a transport and not an operation of the model, so it is here and not among the kernels.
"""

import importlib.util

from torch import Tensor

_BLOCK = 2048

_HAS_TRITON = importlib.util.find_spec("triton") is not None

if _HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def peer_mean_kernel(  # type: ignore[no-untyped-def]
        mine, parts, stride, numel, COUNT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
    ):
        """mine[i] <- (mine[i] + Σ_p parts[p · stride + i]) / (COUNT + 1)"""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(mine + i, i < numel).to(SUM)
        for part in tl.static_range(COUNT):
            total += tl.load(parts + part * stride.to(tl.int64) + i, i < numel).to(SUM)
        tl.store(mine + i, (total / (COUNT + 1)).to(mine.dtype.element_ty), i < numel)

    def _in_one_pass(mine: Tensor, parts: list[Tensor]) -> None:
        numel = mine.numel()
        stride = parts[1].data_ptr() - parts[0].data_ptr() if len(parts) > 1 else 0
        peer_mean_kernel[(triton.cdiv(numel, _BLOCK),)](
            mine,
            parts[0],
            stride // mine.element_size(),
            numel,
            COUNT=len(parts),
            SUM=tl.float64 if mine.element_size() == 8 else tl.float32,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def mean_with(mine: Tensor, parts: list[Tensor]) -> None:
    """Makes `mine` the mean of itself and the parts, all flat and of one type and length.

    On a GPU the parts lie at equal distances. 16-bit values are summed in float32 there, given
    Triton.
    """
    if mine.is_cuda and _HAS_TRITON:
        _in_one_pass(mine, parts)
    else:
        mine.div_(len(parts) + 1)  # before the sum, which could overflow in 16 bits
        for part in parts:
            mine.add_(part, alpha=1 / (len(parts) + 1))
