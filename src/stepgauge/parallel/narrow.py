"""Weights whose gradients are taken in autocast's type, before autograd widens them into `.grad`.

Under autocast the gradient of a linear layer's weight is computed in 16 bits, and widening it is one pass over memory.
A message of 16-bit gradients that were widened already would need a pass to narrow them and one to widen the mean. Here
the only pass is the one that autograd leaves out: from the mean into `.grad`.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class NarrowReads:
    """Lets the linear layers of a module read their weights in `dtype` where autocast would make it of them anyway.

    Within `reading()` such a weight is one node of autograd, whose gradient goes to `take(name, gradient)` in place of
    `.grad`. The tensor that is taken is nobody else's. Parameters, their names and the module's state stay as they are;
    a weight in two places is left alone, and so are all of them in a compiled graph and in what checkpointing computes
    again.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, take: Callable[[str, Tensor], None]):
        self.dtype, self._take = dtype, take
        self._read: dict[str, Tensor] | None = None
        self._anchors: dict[torch.device, Tensor] = {}
        places = collections.Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        for name, owner in module.named_modules():
            if isinstance(owner, nn.Linear) and places[id(owner.weight)] == 1:
                self._attach(owner, f"{name}.weight" if name else "weight")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """For the forward pass: what is read twice in it is one node, and its gradient comes once."""
        self._read = {}
        try:
            yield
        finally:
            self._read = None

    def _attach(self, layer: nn.Linear, name: str) -> None:
        weight = property(lambda layer: self._of(name, layer._parameters["weight"]))
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"weight": weight})

    def _of(self, name: str, weight: nn.Parameter) -> Tensor:
        if self._read is None or not self._is_narrowed(weight):
            return weight
        if name not in self._read:
            anchor = self._anchors.setdefault(weight.device, torch.empty(0, device=weight.device, requires_grad=True))
            take = functools.partial(self._take, name)
            self._read[name] = _Narrowed.apply(anchor, weight.detach(), self.dtype, take)
        return self._read[name]

    def _is_narrowed(self, weight: nn.Parameter) -> bool:
        kind = weight.device.type
        return (
            torch.is_grad_enabled()
            and weight.requires_grad
            and torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) == self.dtype != weight.dtype
            and not torch.compiler.is_compiling()
        )


class _Narrowed(torch.autograd.Function):
    """`.apply(anchor, weight, dtype, take)`: the anchor makes autograd look this way, the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, dtype: torch.dtype, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.take(gradient.detach() if _is_nobody_elses(gradient) else gradient.clone())
        return None, None, None, None


def _is_nobody_elses(gradient: Tensor) -> bool:
    """Whether no other tensor shares its memory: autograd may give one gradient to several who wait for it."""
    storage = gradient.untyped_storage()
    # The wrapper object `storage` is one of its users, and what a view is of another.
    own_users = 2 + gradient._is_view()
    alone: bool = gradient._use_count() == 1  # type: ignore[attr-defined]
    return alone and torch._C._storage_Use_Count(storage._cdata) <= own_users
