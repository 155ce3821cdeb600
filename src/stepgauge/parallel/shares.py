"""Gradients that a rank has only its share of, and that say so when they are taken for all."""

from typing import Any

import torch
from torch import Tensor

# What a norm of all gradients is made of: torch.nn.utils.clip_grad_norm_, or a loop of one's own.
NORMS = (
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
)
# The same values, seen otherwise.
VIEWS = (
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach,
    Tensor.view,
    Tensor.reshape,
    Tensor.flatten,
    torch.flatten,
    torch.reshape,
    torch.cat,
)


class Share(Tensor):
    """The whole gradient of a parameter that this rank owns, while other ranks have others'.

    It is an ordinary tensor but for one thing: norms raise RuntimeError, since those of all
    gradients, added up, would be that of this rank's share.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in NORMS:
            raise RuntimeError(
                "this rank has its share of the gradients only, and so would the norm: clip with "
                "the wrapper's clip_gradients()"
            )
        # What Tensor.__torch_function__ itself does; the way out: a public name of it.
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
            return found.as_subclass(Share) if function in VIEWS else found


def as_share(gradient: Tensor) -> Tensor:
    return gradient.detach().as_subclass(Share)


def as_plain(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)
