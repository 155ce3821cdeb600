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
# The functions with which a user's own code computes a norm from squares or absolute values.
SUMS = (torch.sum, Tensor.sum, torch.max, Tensor.max, torch.amax, Tensor.amax)
MAGNITUDES = (
    *(torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__),
    *(torch.abs, Tensor.abs, Tensor.__abs__),
)
PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__)
# Functions that return the same values: their result is a Share too.
VIEWS = (
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach,
    Tensor.view,
    Tensor.reshape,
    Tensor.flatten,
    Tensor.float,
    Tensor.double,
    Tensor.to,
    Tensor.clone,
    torch.clone,
    torch.flatten,
    torch.reshape,
    torch.cat,
)


class Share(Tensor):
    """The gradient of a parameter that this rank owns, under ZeRO stage 2.

    It behaves like an ordinary tensor, except that norms raise RuntimeError: other ranks have the
    gradients of the other parameters, so a norm over all gradients of this rank would miss them.
    """

    norms: tuple[Any, ...] = NORMS

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in cls.norms:
            raise RuntimeError(
                "this rank has gradients only of the parameters that it owns, so their norm is not "
                "that of all gradients: clip with the wrapper's clip_gradients()"
            )
        # Tensor.__torch_function__ does the same. The way out: a public name of this context.
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if function in MAGNITUDES or _is_square(function, *args, *(kwargs or {}).values()):
                return result.as_subclass(Magnitudes)
            return result.as_subclass(Share) if function in VIEWS else result


def _is_square(function: Any, *factors: Any) -> bool:
    return function in PRODUCTS and factors[0] is factors[1]


class Magnitudes(Share):
    """Squares or absolute values of a Share: their sum or maximum is a norm."""

    norms = (*NORMS, *SUMS)


def as_share(gradient: Tensor) -> Tensor:
    return gradient.detach().as_subclass(Share)


def as_plain(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)
