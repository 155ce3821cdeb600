"""What autograd's engine is doing when an operator runs, and what its nodes hold.

The only file here that asks autograd's private parts. The way out: a public name of the node that
is running, of what a node has saved, and of how many references a tensor has.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def node() -> Any:
    """The node whose gradient is being taken, None outside of backward."""
    return torch._C._current_autograd_node()


def forward_number(of: Any) -> int:
    """Of a node: equal to the `last_number` at the forward operation whose gradient it takes."""
    return of._sequence_nr()


def last_number() -> int:
    """Of the last operation that autograd has noted."""
    return torch.autograd._get_sequence_nr() - 1


def held_tensors(node: Any) -> list[Tensor]:
    """What a node keeps for backward: a Python function's saved tensors in order, or a C++ one's
    fields.
    """
    saved = getattr(node, "saved_tensors", None)
    if saved is not None:
        # Compiled code keeps apart those whose version needs no check.
        values = [*saved, *getattr(node, "_tensors_no_vc_check", ())]
    else:
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, Tensor)]


def storage_number(tensor: Tensor) -> int:
    """Equal of tensors that share a storage, which need not have an address."""
    return tensor.untyped_storage()._cdata


@functools.cache
def held_by_buffer() -> tuple[int, int]:
    """`references` of a gradient that only the engine's buffer holds, found by having two added.

    To be called outside of backward first.
    """
    found: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and node() is not None:
                found.append(references(args[0]))
            return func(*args, **(kwargs or {}))

    with Probe(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 1
        (x.sin() + x.cos()).sum().backward()
    return found[0]


def references(tensor: Any) -> tuple[int, int]:
    """To the tensor and to its storage, as a dispatch mode sees them."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_number(tensor))


def adds_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether this addition is the engine's own, into a gradient that nothing else holds.

    Without a dispatch mode the engine then adds in place (torch/csrc/autograd/input_buffer.cpp);
    under a mode, and for fake tensors, it makes a third tensor.
    """
    if func is not aten.add.Tensor or node() is None or torch.is_grad_enabled():
        return False
    old, new = args
    if not isinstance(new, Tensor) or not old.layout == new.layout == torch.strided:
        return False
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    dense = old.is_contiguous() or old.nbytes == old.untyped_storage().nbytes()
    return dense and references(old) == held_by_buffer()


def takes_sparse(func: Any, args: Sequence[Any]) -> bool:
    """Whether this copy is the engine's own, of a sparse gradient that becomes a weight's `.grad`.

    Without a dispatch mode the engine takes the gradient itself (torch/csrc/autograd/functions/
    accumulate_grad.h); a mode's references to its parts let it copy.
    """
    running = node()
    if func is not aten.clone.default or args[0].layout != torch.sparse_coo or running is None:
        return False
    return running.name().endswith("AccumulateGrad") and args[0]._values().is_contiguous()
