"""Queries autograd's engine: the node that is running, the tensors that nodes hold, and the engine's
own additions and copies.

Only this file uses private parts of autograd. Way out: public names in torch for the running node, a
node's saved tensors, and a tensor's reference count.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def node() -> Any:
    """Returns the node that computes gradients now, or None outside of backward."""
    return torch._C._current_autograd_node()


def forward_number(node: Any) -> int:
    """Returns the sequence number of the node's forward operation."""
    return node._sequence_nr()


def last_number() -> int:
    """Returns the sequence number of the latest forward operation."""
    return torch.autograd._get_sequence_nr() - 1


def held_tensors(node: Any) -> list[Tensor]:
    """Returns the tensors that a node keeps for backward: the saved tensors of a Python function, in
    order, or the fields of a C++ node.
    """
    saved = getattr(node, "saved_tensors", None)
    if saved is not None:
        # Compiled code keeps tensors whose version needs no check in a separate list.
        values = [*saved, *getattr(node, "_tensors_no_vc_check", ())]
    else:
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, Tensor)]


def storage_number(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors with the same storage. It exists for fake tensors,
    too, whose storages have no address.
    """
    return tensor.untyped_storage()._cdata


@functools.cache
def references_of_buffer() -> tuple[int, int]:
    """Returns the reference counts of a gradient that only the engine's input buffer holds, measured
    in a small backward. The first call must be outside of backward.
    """
    counts: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and node() is not None:
                counts.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with Probe(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 1
        (x.sin() + x.cos()).sum().backward()
    return counts[0]


def _references(tensor: Any) -> tuple[int, int]:
    """Returns the reference counts of the tensor and its storage, as a dispatch mode sees them."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_number(tensor))


def adds_in_place(func: Any, args: Sequence[Any]) -> bool:
    """True if the engine itself adds two gradients and nothing else holds the first.

    Without a dispatch mode the engine would add in place (torch/csrc/autograd/input_buffer.cpp).
    Under a mode, and for fake tensors, it creates a third tensor.
    """
    if func is not aten.add.Tensor or node() is None or torch.is_grad_enabled():
        return False
    old, new = args
    if not isinstance(new, Tensor) or not old.layout == new.layout == torch.strided:
        return False
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    is_dense = old.is_contiguous() or old.nbytes == old.untyped_storage().nbytes()
    return is_dense and _references(old) == references_of_buffer()


def is_avoidable_sparse_copy(func: Any, args: Sequence[Any]) -> bool:
    """True if the engine itself copies a sparse gradient into a weight's `.grad`.

    Without a dispatch mode the engine would use the gradient without a copy
    (torch/csrc/autograd/functions/accumulate_grad.h). Under a mode, additional references to the
    gradient's parts make it copy.
    """
    running = node()
    if func is not aten.clone.default or args[0].layout != torch.sparse_coo or running is None:
        return False
    return running.name().endswith("AccumulateGrad") and args[0]._values().is_contiguous()
