"""Predicts the memory that CUDA operators allocate in addition to their outputs. Fake tensors do not
show it.

The sizes follow from torch's sources: aten/src/ATen/cuda/CublasHandlePool.cpp for the workspace of a
cuBLAS handle, one each for the threads of forward and autograd, and the backward kernels of attention
and embeddings for theirs.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepgauge.measure.memory.storage_tracker import Workspace
from stepgauge.spec.units import round_up

# Bytes of a cuBLAS workspace by compute capability (CublasHandlePool.cpp, getChosenWorkspaceSize).
CUBLAS_BYTES: Mapping[str, int] = {"sm80": 4096 * 2 * 1024 + 16 * 8 * 1024, "sm90": 4096 * 8 * 1024}
UNSORTED_INDICES = 3072  # up to so many indices of an embedding are added without sorting
BAG_OF_MAXIMA = 2  # the mode "max" of an embedding bag
aten = torch.ops.aten
PRODUCTS = frozenset(
    (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default)
)


class CudaWorkspaces:
    """Yields the workspaces of each operator, as StorageTracker's argument `workspaces`.

    known  by operator, functions that compute further workspaces from its arguments
    """

    def __init__(self, architecture: str, known: Mapping[str, Callable[[Any], int]] | None = None):
        self.workspace_bytes = CUBLAS_BYTES[architecture]
        self.known = {**KNOWN, **(known or {})}
        # Threads that have a cuBLAS workspace, by whether they run backward.
        self._with_cublas: set[bool] = set()

    def __call__(self, func: Any, args: Any, in_backward: bool) -> Iterable[Workspace]:
        name = func._schema.name
        if func in PRODUCTS and in_backward not in self._with_cublas:
            self._with_cublas.add(in_backward)
            yield Workspace(self.workspace_bytes, "cuBLAS workspace", stays=True)
        if name in self.known and (size := self.known[name](args)):
            yield Workspace(size, f"inside {name.split('::')[1]}")


def _rows(query_BHTD: Tensor) -> int:
    return math.prod(query_BHTD.shape[:-1])


def _flash_backward(args: Any) -> int:
    """Returns the bytes of the queries' fp32 gradient and one value per row, both padded to tiles of
    128 rows (FlashAttention-2). If query heads share keys and values, these have a gradient per query
    head.
    """
    q_BHTD, k_BHTD = args[1], args[2]
    grouped = q_BHTD.shape[1] != k_BHTD.shape[1]
    per_head = 2 * k_BHTD.nbytes // k_BHTD.shape[1] * q_BHTD.shape[1] if grouped else 0
    rows = _rows(q_BHTD) // q_BHTD.shape[-2] * round_up(q_BHTD.shape[-2], 128)
    width = round_up(q_BHTD.shape[-1], 32)
    return rows * width * 4 + rows * 4 + per_head


def _efficient_backward(args: Any) -> int:
    """Returns the bytes of one fp32 value per row, and of fp32 gradients of queries, keys and values
    if these are narrower.
    """
    q_BHTD, k_BHTD = args[1], args[2]
    accumulators = 0 if q_BHTD.dtype == torch.float32 else (q_BHTD.numel() + 2 * k_BHTD.numel()) * 4
    return _rows(q_BHTD) * 4 + accumulators


def _cudnn_backward(args: Any) -> int:
    """Returns the bytes of the queries' fp32 gradient and one fp32 value per row."""
    return args[1].numel() * 4 + _rows(args[1]) * 4


def _embedding_bytes(num_indices: int, num_weights: int, width: int) -> int:
    """Returns the bytes of fp32 partial sums over ten indices each, and of seven lists of indices for
    sorting (EmbeddingBackwardKernel.cu).
    """
    parts = num_indices // 10 + min(num_indices, num_weights)
    return parts * round_up(width, 32) * 4 + 7 * num_indices * 8


def _embedding_backward(args: Any) -> int:
    gradient, indices, num_weights = args[:3]
    if indices.numel() <= UNSORTED_INDICES:
        return 0
    return _embedding_bytes(indices.numel(), num_weights, gradient.shape[-1])


def _embedding_bag_backward(args: Any) -> int:
    gradient_BD, indices = args[:2]
    num_weights, mode, is_sparse = args[6], args[8], args[9]
    if is_sparse or mode == BAG_OF_MAXIMA:
        return 0
    return _embedding_bytes(indices.numel(), num_weights, gradient_BD.shape[-1])


KNOWN: Mapping[str, Callable[[Any], int]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
}
