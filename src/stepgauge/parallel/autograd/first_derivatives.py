"""Custom backward functions that have no second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def without_second_derivative(operation: str) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd Function: it raises RuntimeError under
    create_graph=True.

    torch's once_differentiable raises only if the incoming gradient requires grad. The gradient of
    a loss is a constant, so everything computed from it would count as constant too.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def refusing(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{operation} has no second derivative (create_graph=True)")
            return backward(ctx, *gradients)

        return refusing

    return decorate
