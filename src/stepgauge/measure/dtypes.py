"""Finds the dtype of every parameter, module output, loss and gradient of a step."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.measure.footprint import tensors_in


@dataclasses.dataclass(frozen=True)
class TensorType:
    """The dtype and shape of a tensor in a step.

    what    "parameter", "output", "logits", "loss" or "gradient"
    path    the parameter's name, or the path of the module that returned the output
    module  class of the module
    """

    what: str
    path: str
    module: str
    dtype: str
    shape: tuple[int, ...]


def probe(
    module: nn.Module, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> list[TensorType]:
    """Runs forward and backward once, and returns the dtypes of the parameters, and of the outputs,
    the loss and the gradients in the order in which they are computed.

    Compiled modules show no outputs, so probe the module uncompiled.
    """
    tensors = [dtype_of("parameter", path, p, owner) for path, p, owner in _parameters(module)]
    paths = {part: path for path, part in module.named_modules()}

    def note(part: nn.Module, arguments: Any, output: Any) -> None:
        owner = type(part).__name__
        tensors.extend(dtype_of("output", paths[part], x, owner) for x in tensors_in(output))

    hooked = [
        part
        for part in paths
        if part is not module and not isinstance(part, torch.jit.ScriptModule)  # it takes no hooks
    ]
    handles = [part.register_forward_hook(note) for part in hooked]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    tensors.append(dtype_of("loss", "", loss, type(module).__name__))
    backward(loss)
    tensors += [
        dtype_of("gradient", path, p.grad, owner)
        for path, p, owner in _parameters(module)
        if p.grad is not None
    ]
    return tensors


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            yield f"{path}.{name}".lstrip("."), parameter, type(part).__name__


def dtype_of(what: str, path: str, tensor: Tensor, module: str) -> TensorType:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorType(what, path, module, dtype, tuple(tensor.shape))


def accumulation(device: torch.device) -> dict[str, float]:
    """Adds 0.01 a thousand times and returns the sums by the dtypes of terms and sum.

    0.01 is not a binary fraction: fp32 holds 0.00999999978, fp16 holds 0.01000213623. A thousand of
    the second are 10.0021 in any exact sum. A sum in fp16 has a further error, because above 8 it is
    rounded to multiples of 0.0078.
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
