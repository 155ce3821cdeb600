"""The device tables with which one launch updates any number of tensors, and that launch.

A ``Tables`` object is for one set of tensors on one device with one pair of types. The parts that
depend only on sizes (chunks, lengths, the counter) are sent once. The addresses are sent again only
when one of them changed, asynchronously from pinned memory. No ring of buffers is needed for this,
because torch's caching allocators do not reuse a pinned or device block while a copy or kernel
still uses it.
"""

import array
import math

import torch
from torch import Tensor

from . import triton as kernels

ALIGNMENT_BYTES = 16


class Tables:
    """Chunk and address tables for tensors with these numbers of elements; a program updates
    `chunk` elements.
    """

    def __init__(self, numels: list[int], device: torch.device, *, chunk: int):
        self.device, self.chunk = device, chunk
        self.num_tensors = len(numels)
        counts = torch.tensor([-(-n // chunk) for n in numels], dtype=torch.int64)
        tensor_index = torch.repeat_interleave(torch.arange(len(numels)), counts)
        within = torch.arange(len(tensor_index)) - (counts.cumsum(0) - counts)[tensor_index]
        self.num_chunks = len(tensor_index)
        self.chunks = _send(torch.stack([tensor_index, within], dim=1).to(torch.int32), device)
        self.numels = _send(torch.tensor(numels, dtype=torch.int64), device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._addresses: list[int] | None = None
        self._table: Tensor | None = None

    def table(self, addresses: list[int]) -> Tensor:
        """Returns the address table, int64 of shape (kernels.TABLE_ROWS, tensors)."""
        if addresses != self._addresses:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "FusedAdamW cannot send new addresses while a CUDA graph is captured: make one "
                    "step with the same parameters and gradients before, and keep their memory"
                )
            host = torch.frombuffer(array.array("q", addresses), dtype=torch.int64)
            self._table = _send(host, self.device)
            self._addresses = addresses
        return self._table


def shape_for(param_dtype: torch.dtype) -> kernels.Shape:
    return kernels.SHAPES[param_dtype.itemsize]


def _send(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.clone().to(device)
    pinned = torch.empty_like(host, pin_memory=True).copy_(host)
    return torch.empty_like(host, device=device).copy_(pinned, non_blocking=True)


def addresses_of(*rows: list[Tensor]) -> list[int]:
    """Returns the tensors' addresses row by row, in the order of kernels.TABLE_ROWS."""
    return [t.data_ptr() for row in rows for t in row]


def aligned(addresses: list[int]) -> bool:
    combined = 0
    for address in addresses:
        combined |= address
    return combined % ALIGNMENT_BYTES == 0


def launch(
    tables: Tables,
    addresses: list[int],
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    lr: float | Tensor,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **numbers: float,
) -> None:
    """Updates all tensors of ``tables`` in one launch; the options are those of
    reference.adamw_.
    """
    if not tables.num_chunks:
        return
    shape, num = shape_for(param_dtype), tables.num_tensors
    lr_ptr = lr if isinstance(lr, Tensor) else None
    # Row 4, the steps, needs no alignment, because the kernel reads them as scalars.
    vectors = addresses[: 4 * num] + addresses[5 * num :]
    kernels.adamw_kernel[(tables.num_chunks,)](
        tables.chunks, tables.numels, tables.table(addresses), tables.counter, lr_ptr, grad_scale, found_inf,
        num, 0.0 if lr_ptr is not None else float(lr), *_scalars(**numbers),
        PARAM_TYPE=_triton_type(param_dtype), GRAD_TYPE=_triton_type(grad_dtype), CHUNK=tables.chunk,
        BLOCK=min(shape.block, tables.chunk), ALIGNED=aligned(vectors), MAXIMIZE=maximize,
        HAS_LR=lr_ptr is not None, HAS_SCALE=grad_scale is not None,
        HAS_FOUND_INF=found_inf is not None, HAS_MASTER=len(addresses) > 5 * num,
        num_warps=shape.num_warps,
    )  # fmt: skip


def _scalars(*, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    # Logarithms and differences are computed here in float64: 0.999 in float32 is off by 1.3e-8,
    # which is 1.3e-5 of 1 - 0.999.
    logarithms = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
    return *logarithms, 1.0 - beta1, 1.0 - beta2, float(eps), float(weight_decay)


def _triton_type(dtype: torch.dtype):
    return kernels.TYPES[str(dtype).removeprefix("torch.")]
