"""What autograd says about the running backward: which parameters it reaches, and when it ends.

A backward that raises also ends: autograd then drops the callback without calling it, and the
callback is called here when it is deleted. The gradients computed so far are still reduced, so no
rank waits for another rank that failed.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge


def at_end_of_backward(method: Callable[[bool], None], device: torch.device) -> None:
    """Calls `method(failed)` when the running backward ends; failed is True if it raised. Must be
    called from a hook inside that backward.

    torch's DistributedDataParallel and fully_shard use the same entry, which has no public name.
    """
    Variable._execution_engine.queue_callback(_EndOfBackward(method, device))


def will_execute(node: Any) -> bool:
    """Returns True if the running backward will call an autograd node. `backward(inputs=...)` skips
    some. Raises RuntimeError inside autograd.grad for the node of a parameter, because autograd.grad
    returns that gradient instead of accumulating it.
    """
    # The way out: a public name of this function, which register_multi_grad_hook needs too.
    return torch._C._will_engine_execute_node(node)


def accumulates_into(parameter: nn.Parameter) -> bool:
    """Returns True if the running backward adds to the parameter's `.grad`. autograd.grad calls the
    parameter's hooks too, but leaves `.grad` as it is.
    """
    try:
        return parameter.requires_grad and will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # inside autograd.grad
        return False


def is_inside_func_transform() -> bool:
    """Returns True inside a transform of torch.func, such as grad or vmap."""
    return torch._C._are_functorch_transforms_active()  # the way out: a public name of it


class _EndOfBackward:
    def __init__(self, method: Callable[[bool], None], device: torch.device):
        self._method = weakref.WeakMethod(method)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._called = False

    def __call__(self, failed: bool = False) -> None:
        self._called = True
        if (method := self._method()) is not None:
            method(failed)

    def __del__(self) -> None:
        if self._called:
            return
        # An error here follows from the one that ended backward, or the other ranks are gone.
        with torch.cuda.stream(self._stream), contextlib.suppress(Exception):
            self(failed=True)
