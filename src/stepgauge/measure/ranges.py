"""Names for the parts of a model and of a step, in the profiler's trace and, on CUDA, in nsys and
ncu as well.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from stepgauge.ranges import recorded


@contextlib.contextmanager
def named(name: str, *, nvtx: bool) -> Iterator[None]:
    """A range of torch.profiler, and an NVTX range of the same name."""
    with record_function(name), torch.cuda.nvtx.range(name) if nvtx else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def module_ranges(module: nn.Module, *, nvtx: bool) -> Iterator[None]:
    """Inside, every submodule's forward is a range of its qualified name, and so is what the code
    marks itself.

    Not for a compiled module: what runs there is a graph that has no modules.
    """
    hooks: list[Any] = []
    try:
        for name, part in _named_parts(module, "", {module}):
            if not isinstance(part, nn.ModuleList):
                hooks += _hooked(part, name, nvtx)
        with recorded(lambda name: named(name, nvtx=nvtx)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _named_parts(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[Any]:
    """Every submodule once, with its qualified name; of a scripted one none, which takes no hooks.

    Children of an nn.Sequential of several types carry theirs, "layers.0 (Linear)": what is
    summed over equal blocks must not sum a convolution and an activation.
    """
    mixed = isinstance(module, nn.Sequential) and len({type(part) for part in module}) > 1
    for name, part in module.named_children():
        if part in seen or isinstance(part, torch.jit.ScriptModule):
            continue
        seen.add(part)
        path = f"{prefix}{name} ({type(part).__name__})" if mixed else f"{prefix}{name}"
        yield path, part
        yield from _named_parts(part, f"{path}.", seen)


def _hooked(part: nn.Module, name: str, nvtx: bool) -> list[Any]:
    open_ranges: list[contextlib.AbstractContextManager[None]] = []

    def enter(*_: Any) -> None:
        open_ranges.append(named(name, nvtx=nvtx))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [
        part.register_forward_pre_hook(enter),
        part.register_forward_hook(leave, always_call=True),
    ]
