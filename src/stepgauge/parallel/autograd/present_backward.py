"""What autograd tells of the backward that goes on: which weights it comes to, and when it ends.

A backward that raises ends as well: autograd drops the callback of its end without calling it, and
what was not sent then is sent all the same. So no rank waits for another that failed, and gradients
mean what they mean in one process: sums of what was computed, here averaged.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge


def at_end_of_backward(call: Callable[[bool], None], device: torch.device) -> None:
    """Calls when the present backward ends, with whether it raised. To be called from a hook of it.

    torch's DistributedDataParallel and fully_shard use the same entry, which has no public name.
    """
    Variable._execution_engine.queue_callback(_End(call, device))


def goes_on_to(node: Any) -> bool:
    """Whether the present backward calls a weight's node: not all where it was given `inputs`.
    Raises RuntimeError in autograd.grad, which keeps what would be added to the weight.
    """
    # The way out: a public name of it, which register_multi_grad_hook needs too.
    return torch._C._will_engine_execute_node(node)


def adds_to(parameter: nn.Parameter) -> bool:
    """Whether the present backward adds to a parameter's `.grad`: autograd.grad, which does not,
    calls the parameter's hooks too.
    """
    try:
        return parameter.requires_grad and goes_on_to(get_gradient_edge(parameter).node)
    except RuntimeError:  # autograd.grad
        return False


def is_transformed() -> bool:
    """Whether torch.func differentiates or maps what is computed now."""
    return torch._C._are_functorch_transforms_active()  # the way out: a public name of it


class _End:
    def __init__(self, call: Callable[[bool], None], device: torch.device):
        self._call = weakref.WeakMethod(call)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._called = False

    def __call__(self, failed: bool = False) -> None:
        self._called = True
        if (call := self._call()) is not None:
            call(failed)

    def __del__(self) -> None:
        if self._called:
            return
        # What fails here has failed in backward already, or its ranks are gone.
        with torch.cuda.stream(self._stream), contextlib.suppress(Exception):
            self(failed=True)
