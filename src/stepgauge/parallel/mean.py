"""The mean of a tensor and of what came from peers, in one pass: each value is read once, the mean is written once.

A part of a transport and not an operation of the model, so it is here and not among the kernels.
"""

import contextlib
import functools
import importlib.util

import torch
from torch import Tensor

from stepgauge.native.launch import ALIGNMENT_BYTES, Launch

_BLOCK = 2048

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["stride", "numel"])
    def peer_mean_kernel(mine, parts, stride, numel, COUNT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """mine[i] <- (mine[i] + Σ_p parts[p · stride + i]) / (COUNT + 1)"""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(mine + i, i < numel).to(SUM)
        for part in tl.static_range(COUNT):
            total += tl.load(parts + part * stride.to(tl.int64) + i, i < numel).to(SUM)
        tl.store(mine + i, (total / (COUNT + 1)).to(mine.dtype.element_ty), i < numel)

    @functools.cache
    def _launch_of(device: torch.device, dtype: torch.dtype, count: int) -> Launch:
        total = tl.float64 if dtype.itemsize == 8 else tl.float32
        return Launch(peer_mean_kernel, COUNT=count, SUM=total, BLOCK=_BLOCK, num_warps=8)

    def _in_one_pass(mine: Tensor, parts: list[Tensor], stream: int | None) -> None:
        stride = parts[1].data_ptr() - parts[0].data_ptr() if len(parts) > 1 else 0
        addresses, numbers = (mine.data_ptr(), parts[0].data_ptr()), (stride // mine.element_size(), mine.numel())
        launch, blocks = _launch_of(mine.device, mine.dtype, len(parts)), triton.cdiv(mine.numel(), _BLOCK)
        if stream is None or any(address % ALIGNMENT_BYTES for address in addresses):
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                launch.through_jit(blocks, 1, mine, parts[0], *numbers)
            return
        if not launch.compiled:
            launch.compile(mine, parts[0], *numbers)
        launch.direct(blocks, 1, stream, *addresses, *numbers)


def mean_with(mine: Tensor, parts: list[Tensor], stream: int | None = None) -> None:
    """Makes `mine` the mean of itself and the parts, all flat and of one type and length.

    On a GPU the parts lie at equal distances, and 16-bit values are summed in float32. stream: its address there; the
    current one without.
    """
    if mine.is_cuda:
        _in_one_pass(mine, parts, stream)
    else:
        mine.div_(len(parts) + 1)  # before the sum, which could overflow in 16 bits
        for part in parts:
            mine.add_(part, alpha=1 / (len(parts) + 1))
