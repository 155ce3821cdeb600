"""Which type every parameter, module output, loss and gradient of a step has."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.measure.footprint import tensors_in


@dataclasses.dataclass(frozen=True)
class Found:
    """what: "parameter", "output", "logits", "loss" or "gradient"; path: its name or module."""

    what: str
    path: str
    module: str
    dtype: str
    shape: tuple[int, ...]


def probe(
    module: nn.Module, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> list[Found]:
    """Runs forward and backward once, and tells the type of all that they make, in the order in
    which it is made.

    Compiled parts show no outputs: probe the module uncompiled.
    """
    found = [dtype_of("parameter", path, p, owner) for path, p, owner in _parameters(module)]
    paths = {part: path for path, part in module.named_modules()}

    def note(part: nn.Module, arguments: Any, output: Any) -> None:
        owner = type(part).__name__
        found.extend(dtype_of("output", paths[part], x, owner) for x in tensors_in(output))

    watched = [
        part
        for part in paths
        if part is not module and not isinstance(part, torch.jit.ScriptModule)  # it takes no hooks
    ]
    handles = [part.register_forward_hook(note) for part in watched]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    found.append(dtype_of("loss", "", loss, type(module).__name__))
    backward(loss)
    found += [
        dtype_of("gradient", path, p.grad, owner)
        for path, p, owner in _parameters(module)
        if p.grad is not None
    ]
    return found


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            yield f"{path}.{name}".lstrip("."), parameter, type(part).__name__


def dtype_of(what: str, path: str, tensor: Tensor, module: str) -> Found:
    return Found(what, path, module, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def accumulation(device: torch.device) -> dict[str, float]:
    """1000 times 0.01 added up in four ways: what each type of sum and of summand makes of 10.

    0.01 is no binary fraction: fp32 holds 0.00999999978, fp16 0.01000213623. The sum of the second
    is 10.0021 however finely it is added; a sum in fp16 is rounded to its 0.0078 steps beyond 8
    besides.
    """

    def total(sum_dtype: torch.dtype, term_dtype: torch.dtype, cast: bool) -> float:
        result = torch.tensor(0.0, dtype=sum_dtype, device=device)
        for _ in range(1000):
            term = torch.tensor(0.01, dtype=term_dtype, device=device)
            result += term.to(sum_dtype) if cast else term
        return result.item()

    wide, narrow = torch.float32, torch.float16
    return {
        "fp32 terms into an fp32 sum": total(wide, wide, False),
        "fp16 terms into an fp16 sum": total(narrow, narrow, False),
        "fp16 terms into an fp32 sum": total(wide, narrow, False),
        "fp16 terms, cast to fp32, into an fp32 sum": total(wide, narrow, True),
    }
