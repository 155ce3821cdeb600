"""Hooks of parameters and modules. torch lists the hooks of a parameter only under private names."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def requiring_grad(parameter: Tensor) -> Iterator[None]:
    """Sets requires_grad inside the context. torch refuses to register a hook on a frozen parameter,
    but the parameter may be trained later.
    """
    required = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(required)


class WrapperHook:
    """A hook of a data-parallel wrapper: calls its method with the parameter's number, for as long as
    the wrapper exists.

    The hook refers to the wrapper weakly: the garbage collector does not see the references that
    autograd holds, so a strong one would keep the wrapper and all weights alive forever.
    """

    def __init__(self, method: Callable[[int], None], number: int):
        self._method, self._number = weakref.WeakMethod(method), number

    def __call__(self, _: Tensor) -> None:
        if (method := self._method()) is not None:
            method(self._number)


def tensor_hooks(parameter: Tensor) -> Collection[Any]:
    """Returns the hooks of `register_hook`, which autograd calls with a gradient before it adds the
    gradient to `.grad`.
    """
    return (parameter._backward_hooks or {}).values()


def post_accumulate_hooks(parameter: Tensor) -> Collection[Any]:
    """Returns the hooks of `register_post_accumulate_grad_hook`, which autograd calls with the
    parameter after it has added to `.grad`.
    """
    return (parameter._post_accumulate_grad_hooks or {}).values()


def without_wrapper_hooks(hooks: Collection[Any]) -> list[Any]:
    """Returns the hooks that no data-parallel wrapper registered."""
    return [hook for hook in hooks if not isinstance(hook, WrapperHook)]


def num_hooks(parameter: Tensor) -> int:
    return len(tensor_hooks(parameter)) + len(post_accumulate_hooks(parameter))


def share_hooks(first: Tensor, second: Tensor) -> None:
    """Gives the hooks of the first tensor to the second. Their handles remove them from both."""
    second._backward_hooks = first._backward_hooks
    second._post_accumulate_grad_hooks = first._post_accumulate_grad_hooks


def share_forward_hooks(first: nn.Module, second: nn.Module) -> None:
    """Gives the forward hooks of the first module to the second. Their handles remove them from both."""
    second._forward_hooks = first._forward_hooks
    second._forward_hooks_with_kwargs = first._forward_hooks_with_kwargs
    second._forward_hooks_always_called = first._forward_hooks_always_called


def hooks_of_module(module: nn.Module) -> list[str]:
    """Returns the names of the attributes in which the module has hooks, one for each kind."""
    return [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
