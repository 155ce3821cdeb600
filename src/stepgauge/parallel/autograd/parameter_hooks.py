"""Hooks of parameters and of modules: ours, and those of others, which torch lists under private
names alone.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def taking_hooks(parameter: Tensor) -> Iterator[None]:
    """What is frozen takes no hook, and may be trained later."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(trained)


class Weakly:
    """A hook that calls the method with the number of its parameter, as long as its object is there.

    Autograd holds hooks where the garbage collector does not look: through them the wrapper, and
    all weights, would never be freed.
    """

    def __init__(self, method: Callable[[int], None], number: int):
        self._method, self._number = weakref.WeakMethod(method), number

    def __call__(self, _: Tensor) -> None:
        if (call := self._method()) is not None:
            call(self._number)


def hooks_before(parameter: Tensor) -> Collection[Any]:
    """Those that autograd calls with a gradient before it adds it to `.grad`."""
    return (parameter._backward_hooks or {}).values()


def others_before(parameter: Tensor) -> list[Any]:
    """Of `hooks_before`, those that are not a wrapper's."""
    return [hook for hook in hooks_before(parameter) if not isinstance(hook, Weakly)]


def hooks_after(parameter: Tensor) -> Collection[Any]:
    """Those that autograd calls with the parameter when its `.grad` is there."""
    return (parameter._post_accumulate_grad_hooks or {}).values()


def others_after(parameter: Tensor) -> list[Any]:
    """Of `hooks_after`, those that are not a wrapper's."""
    return [hook for hook in hooks_after(parameter) if not isinstance(hook, Weakly)]


def num_hooks(parameter: Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def share_hooks(first: Tensor, second: Tensor) -> None:
    """The second has the hooks of the first, with the handles that remove them."""
    second._backward_hooks = first._backward_hooks
    second._post_accumulate_grad_hooks = first._post_accumulate_grad_hooks


def hooks_of_module(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has; torch lists them in one attribute each."""
    return [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
