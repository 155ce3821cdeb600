"""Adds to an error the part of the network that raised it. The line of the user's file may only call
a container such as nn.Sequential.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stepgauge.parallel.named_state import plain_name


@contextlib.contextmanager
def named_module(network: Callable[..., Any]) -> Iterator[None]:
    """Prefixes the message of an exception with the submodule that raised it, such as "in module
    2.linear (Linear): ...", and keeps the exception's type.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        part = _innermost(error, network)
        if part and error.args and str(error) == error.args[0]:
            error.args = (f"in module {part}: {error}", *error.args[1:])
        raise


@contextlib.contextmanager
def explained_without_loss(batch: Any) -> Iterator[None]:
    """Adds to a TypeError that a pair (inputs, targets) needs a loss function, which is not given."""
    try:
        yield
    except TypeError as error:
        if isinstance(batch, tuple | list) and len(batch) == 2 and "argument" in str(error):
            hint = "the batch is a pair: if it is (inputs, targets), give a loss function as well"
            error.args = (f"{error}; {hint}",)
        raise


def _innermost(error: Exception, network: Callable[..., Any]) -> str:
    """Returns the name and class of the innermost submodule in the traceback, or ""."""
    if not isinstance(network, nn.Module):
        return ""
    names = {id(part): plain_name(name) for name, part in network.named_modules()}
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if name := names.get(id(module), ""):
            innermost = f"{name} ({type(module).__name__})"
    return innermost
