"""Loads a user's function from a file. docs/bench_op.md explains the format with examples.

FILE.py defines the function NAME(*inputs) and
    NAME_inputs(device) or inputs(device)   returns the tuple of inputs; required
    NAME_reference(*inputs)                 returns the correct result; optional
    NAME_bytes, NAME_flops                  numbers, or functions of the inputs; optional
FILE.cu binds NAME with PYBIND11_MODULE. The other names are in a FILE.py in the same folder.
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
    """A user's function with its inputs. num_bytes and num_flops are None if the file has neither."""

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
        """Returns the inputs with all tensors copied. The copies keep their strides."""
        return tree_map_only(
            Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), self.inputs
        )

    def restore(self, copies: tuple[Any, ...]) -> None:
        """Writes the values of copied inputs back into the inputs."""
        with torch.no_grad():
            for tensor, value in zip(tensors_in(self.inputs), tensors_in(copies), strict=True):
                tensor.copy_(value)


def require_tools(path: Path, device: torch.device) -> None:
    """Raises ValueError if the file is a CUDA source that cannot be built or run."""
    if path.suffix != ".cu":
        return
    if device.type != "cuda":
        raise ValueError(f"{path} is a CUDA source; it needs a CUDA device, and device is {device}")
    if shutil.which("nvcc") is None:
        raise ValueError(
            f"{path} is a CUDA source; building it needs nvcc, which is not on the path"
        )


def problem(path: Path, name: str) -> str | None:
    """Returns why the file cannot be used, or None: it cannot be imported, or lacks the function or
    its inputs. Does not build a CUDA source.
    """
    try:
        _function_and_inputs(path, name, vars(load_file(path.with_suffix(".py"))))
    except ValueError as error:
        return str(error)
    return None


def load(file: str, name: str, device: torch.device) -> UserFunction:
    """Loads the function and makes its inputs. Raises ValueError if the file lacks a required name or
    has a wrong number.
    """
    path = Path(file)
    require_tools(path, device)
    namespace = vars(load_file(path.with_suffix(".py")))
    function, make_inputs = _function_and_inputs(path, name, namespace)
    function = function or _required(vars(_extension(path)), (name,), path)
    torch.manual_seed(0)
    inputs = make_inputs(device)
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return UserFunction(
        function=function,
        inputs=inputs,
        reference=namespace.get(f"{name}_reference"),
        num_bytes=_number(namespace, f"{name}_bytes", inputs),
        num_flops=_number(namespace, f"{name}_flops", inputs),
    )


def _function_and_inputs(
    path: Path, name: str, namespace: Mapping[str, Any]
) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """Returns the function and the function that makes its inputs. The first is None for a CUDA
    source, which is not built yet. Raises ValueError if a function is missing.
    """
    function = _required(namespace, (name,), path) if path.suffix == ".py" else None
    return function, _required(namespace, (f"{name}_inputs", "inputs"), path.with_suffix(".py"))


def _extension(path: Path) -> Any:
    from torch.utils.cpp_extension import load as build

    return build(name=path.stem, sources=[str(path)], extra_cuda_cflags=["-O3"])


def _required(
    namespace: Mapping[str, Any], names: tuple[str, ...], path: Path
) -> Callable[..., Any]:
    """Returns the first of the named functions that exists. Raises ValueError if none does."""
    for name in names:
        if callable(namespace.get(name)):
            return namespace[name]
    own = [
        n for n, value in namespace.items() if inspect.isfunction(value) and not n.startswith("_")
    ]
    raise ValueError(
        f"{path} defines no {' or '.join(names)}; it has {', '.join(own) or 'no function'}"
    )


def _number(namespace: Mapping[str, Any], name: str, inputs: tuple[Any, ...]) -> float | None:
    value = namespace.get(name)
    if callable(value):
        value = value(*inputs)
    if value is None or (isinstance(value, int | float) and 0 <= value < math.inf):
        return value
    raise ValueError(
        f"{name} is {value!r}; it must be a number of at least 0, or a function of the inputs that "
        "returns one"
    )
