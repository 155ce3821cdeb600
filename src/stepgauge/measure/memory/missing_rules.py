"""Shape rules for operators whose rules in torch's fake tensors are missing or wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
BAG_IS_SPARSE = 9  # position of an argument of _embedding_bag_backward
SIZE_BY_VALUES = "returns a number of elements that depends on the values of its input"


class NotPredictableError(Exception):
    """The step runs something that fake tensors cannot; the message is one sentence."""


def _grouped_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The product of experts. torch's rule accepts only bf16, CUDA other dtypes too."""
    narrow = aten._grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
    return narrow if a.dtype == torch.bfloat16 else torch.empty_like(narrow, dtype=a.dtype)


def _clone(tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """torch's rule clones a sparse tensor without its elements."""
    if tensor.layout != torch.sparse_coo:
        return aten.clone(tensor, memory_format=memory_format)
    return _sparse(tensor._indices().clone(), tensor._values().clone(), tensor.shape)


def _add(a: Tensor, b: Any, **kwargs: Any) -> Tensor:
    """The sum of two sparse tensors has the elements of both."""
    if not isinstance(b, Tensor) or not a.layout == b.layout == torch.sparse_coo:
        return aten.add(a, b, **kwargs)
    indices = torch.cat([a._indices(), b._indices()], dim=1)
    return _sparse(indices, torch.cat([a._values(), b._values()]), a.shape)


def _add_in_place(into: Tensor, other: Any, **kwargs: Any) -> Tensor:
    """Adding a sparse tensor does not change the size of a dense one; a sparse one grows."""
    if isinstance(other, Tensor) and other.layout != torch.strided:
        if into.layout == torch.strided:
            return into
        raise NotPredictableError(f"{aten.add_.Tensor} {SIZE_BY_VALUES}")
    return aten.add_(into, other, **kwargs)


def _embedding_bag_backward(*args: Any) -> Tensor:
    """The sparse gradient has a row for each index; in torch's rule it has none."""
    if not args[BAG_IS_SPARSE]:
        return aten._embedding_bag_backward(*args)
    gradient_BD, indices, num_weights = args[0], args[1], args[6]
    width = gradient_BD.shape[1]
    rows = gradient_BD.new_empty(indices.numel(), width)
    return _sparse(indices.reshape(1, -1), rows, (num_weights, width))


def _coalesce(tensor: Tensor) -> Tensor:
    raise NotPredictableError(f"{aten._coalesce.default} {SIZE_BY_VALUES}")


def _reduced(loss: Any) -> Callable[..., Tensor]:
    """Returns the rule of a loss whose result keeps the storage of all elements: on every device torch
    computes the elements in the result, and then shrinks it to their mean or sum
    (aten/src/ATen/native/Loss.cpp, cuda/Loss.cu).
    """

    def rule(output: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = loss(output, target, *args, **kwargs)
        shape = torch.broadcast_shapes(output.shape, target.shape)
        elements = value.new_empty(shape)
        return elements.as_strided((), ()) if value.ndim == 0 < elements.numel() else value

    return rule


def _sparse(indices: Tensor, values: Tensor, shape: Any) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0], values.ndim - 1, shape, indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip


RULES: Mapping[Any, Callable[..., Tensor]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten.clone.default: _clone,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_in_place,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._coalesce.default: _coalesce,
    **{
        loss.default: _reduced(loss.default)
        for loss in (
            aten.mse_loss,
            aten.smooth_l1_loss,
            aten.binary_cross_entropy,
            aten.soft_margin_loss,
        )
    },
}
