"""Gradients that a rank has only its share of, and that say so when they are taken for all."""

from typing import Any

import torch
from torch import Tensor

# what torch.nn.utils.clip_grad_norm_ and get_total_norm are made of
NORMS = (torch.linalg.vector_norm, torch._foreach_norm)


class Share(Tensor):
    """The whole gradient of a parameter that this rank owns, while other ranks have others'.

    It is an ordinary tensor but for one thing: a norm over the gradients of all parameters, which
    would be that of this rank's share, raises RuntimeError.
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
            return function(*args, **(kwargs or {}))


def as_share(gradient: Tensor) -> Tensor:
    return gradient.detach().as_subclass(Share)


def as_plain(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)
