"""A tensor class for gradients that only their owner has, so that a norm of them raises."""

from typing import Any

import torch
from torch import Tensor

# The functions with which torch.nn.utils.clip_grad_norm_ or a user's own loop compute a norm.
NORMS = (
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
)
# Functions that return the same values: their result is a Share too.
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
    """The gradient of a parameter that this rank owns, under ZeRO stage 2.

    It behaves like an ordinary tensor, except that norms raise RuntimeError: other ranks have the
    gradients of the other parameters, so a norm over all gradients of this rank would miss them.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in NORMS:
            raise RuntimeError(
                "this rank has gradients only of the parameters that it owns, so their norm is not "
                "that of all gradients: clip with the wrapper's clip_gradients()"
            )
        # Tensor.__torch_function__ does the same. The way out: a public name of this context.
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result.as_subclass(Share) if function in VIEWS else result


def as_share(gradient: Tensor) -> Tensor:
    return gradient.detach().as_subclass(Share)


def as_plain(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)
