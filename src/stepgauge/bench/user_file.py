"""The protocol of a file that holds a person's own function: docs/bench_op.md has it with examples.

FILE.py defines `NAME(*inputs)`, and beside it
    NAME_inputs(device) or inputs(device)   the tuple of inputs; required
    NAME_reference(*inputs)                 what is right; without it nothing is checked
    NAME_bytes, NAME_flops                  numbers, or functions of the inputs that give them
FILE.cu binds NAME with PYBIND11_MODULE; the rest stands in a FILE.py of the same name beside it.
"""

import dataclasses
import inspect
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stepgauge.measure.footprint import tensors_in
from stepgauge.runtime.load_file import load_file


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """num_bytes and num_flops are None where the file does not say."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    reference: Callable[..., Any] | None
    num_bytes: float | None
    num_flops: float | None

    def call(self) -> Any:
        return self.function(*self.inputs)

    def reference_call(self) -> Any:
        assert self.reference is not None
        return self.reference(*self.inputs)

    def copied_inputs(self) -> tuple[Any, ...]:
        """The inputs with tensors of their own, of the same strides."""
        return tree_map_only(Tensor, _copied, self.inputs)

    def restore(self, kept: tuple[Any, ...]) -> None:
        """Writes the values of copied inputs back into the inputs."""
        with torch.no_grad():
            for tensor, value in zip(tensors_in(self.inputs), tensors_in(kept), strict=True):
                tensor.copy_(value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def require_tools(path: Path, device: torch.device) -> None:
    """Raises ValueError where a CUDA source cannot be built or run."""
    if path.suffix != ".cu":
        return
    if device.type != "cuda":
        raise ValueError(f"{path} is a CUDA source; it needs a CUDA device, and device is {device}")
    if shutil.which("nvcc") is None:
        raise ValueError(
            f"{path} is a CUDA source; building it needs nvcc, which is not on the path"
        )


def problem(path: Path, name: str) -> str | None:
    """Why the file cannot serve: it does not import, or has no such function or no inputs; a CUDA
    source unbuilt.
    """
    try:
        _own(path, name, vars(load_file(path.with_suffix(".py"))))
    except ValueError as error:
        return str(error)
    return None


def load(file: str, name: str, device: torch.device) -> UserFunction:
    """The function and what stands beside it, its inputs made. Raises ValueError for what the file
    lacks.
    """
    path = Path(file)
    require_tools(path, device)
    module = load_file(path.with_suffix(".py"))
    given = vars(module)
    function, make = _own(path, name, given)
    function = function or _required(vars(_extension(path)), (name,), path)
    torch.manual_seed(0)
    inputs = make(device)
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return UserFunction(
        function=function,
        inputs=inputs,
        reference=given.get(f"{name}_reference"),
        num_bytes=_number(given, f"{name}_bytes", inputs),
        num_flops=_number(given, f"{name}_flops", inputs),
    )


def _own(
    path: Path, name: str, given: Mapping[str, Any]
) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """The function, None where it is still to be built, and what makes its inputs. Raises
    ValueError without them.
    """
    function = _required(given, (name,), path) if path.suffix == ".py" else None
    return function, _required(given, (f"{name}_inputs", "inputs"), path.with_suffix(".py"))


def _extension(path: Path) -> Any:
    from torch.utils.cpp_extension import load as build

    return build(name=path.stem, sources=[str(path)], extra_cuda_cflags=["-O3"])


def _required(given: Mapping[str, Any], wanted: tuple[str, ...], path: Path) -> Callable[..., Any]:
    for name in wanted:
        if callable(given.get(name)):
            return given[name]
    own = [n for n, value in given.items() if inspect.isfunction(value) and not n.startswith("_")]
    raise ValueError(
        f"{path} defines no {' or '.join(wanted)}; it has {', '.join(own) or 'no function'}"
    )


def _number(given: Mapping[str, Any], name: str, inputs: tuple[Any, ...]) -> float | None:
    value = given.get(name)
    if callable(value):
        value = value(*inputs)
    if value is None or (isinstance(value, int | float) and 0 <= value < math.inf):
        return value
    raise ValueError(
        f"{name} is {value!r}; it must be a number of at least 0, or a function of the inputs that "
        "gives one"
    )
