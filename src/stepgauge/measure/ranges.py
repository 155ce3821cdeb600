"""Names the parts of a model and of a step in the profiler's trace, and on CUDA also in nsys and ncu."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from stepgauge.ranges import recorded


@contextlib.contextmanager
def named(name: str, *, nvtx: bool) -> Iterator[None]:
    """Opens a range of torch.profiler, and with `nvtx` an NVTX range of the same name."""
    with record_function(name), torch.cuda.nvtx.range(name) if nvtx else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def module_ranges(module: nn.Module, *, nvtx: bool) -> Iterator[None]:
    """Inside the context, every submodule's forward is a range with its qualified name, and ranges
    that the code marks (stepgauge.ranges) are recorded too.

    Do not use it on a compiled module, whose graph has no modules.
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
    """Yields every submodule once, with its qualified name, except scripted ones, which take no hooks.

    If the children of an nn.Sequential have different types, the names contain them, as in
    "layers.0 (Linear)". Times are summed over numbered blocks, and a convolution and an activation
    must not be summed.
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
