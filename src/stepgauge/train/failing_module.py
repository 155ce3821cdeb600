"""Which part of a network an error comes from: a line of the user's file that calls a container of
torch's modules does not tell.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def named_module(network: Callable[..., Any]) -> Iterator[None]:
    """What is raised within the block begins with the part of the network that raised it, where it
    is not the whole: "in module 2.linear (Linear): ...". Its type stays.
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


def _innermost(error: Exception, network: Callable[..., Any]) -> str:
    if not isinstance(network, nn.Module):
        return ""
    names = {id(part): name for name, part in network.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if name := names.get(id(running), ""):
            found = f"{name.removeprefix('_orig_mod.')} ({type(running).__name__})"
    return found
