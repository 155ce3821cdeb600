"""Describes an operation for the benchmark: its implementations, inputs with an oracle, and ceiling."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stepgauge.spec.kernel import KernelSpec

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Case(Protocol):
    """The inputs of one shape, and their exact results."""

    def error(self, function: Any) -> float:
        """Returns the largest relative error of the result and its gradients, compared with float64."""

    def call(self, function: Any, passes: str) -> Callable[[], Any]:
        """Returns the call that is timed. It returns the implementation's results and keeps nothing."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation of an operation.

    make    returns the function for a spec; raises ImportError or ValueError if it is not available
    around  context manager in which the function is called; entering it is not timed
    error   replaces the case's error if the function computes something else than ours. Such an
            implementation is not a baseline and runs only if named.
    """

    make: Callable[[Any], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    error: Callable[[Any, Any], float] | None = None

    @property
    def is_baseline(self) -> bool:
        return self.error is None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that is compared.

    spec             its KernelSpec
    implementations  by name, ours first
    case             makes the inputs of a spec on its device
    ceiling          the limit of its speed: "copy" (work in bytes) or "matmul" (work in FLOPs)
    work             returns bytes or FLOPs of a spec in the named implementation
    reduction        returns the length of its longest sum, with which rounding errors grow
    """

    spec: type[KernelSpec]
    implementations: Mapping[str, Implementation]
    case: Callable[[Any], Case]
    ceiling: str
    work: Callable[[Any, str], float]
    reduction: Callable[[Any], int]


class Differentiable:
    """The case of a function with one result and gradients of the inputs that require them.

    error_of  takes [result, *gradients] and returns the largest relative error
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        grad: Tensor | None,
        error_of: Callable[[Sequence[Tensor]], float],
    ):
        self.inputs = inputs
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self.grad = grad
        self.error_of = error_of

    def error(self, function: Any) -> float:
        result = function(*self.inputs)
        gradients = torch.autograd.grad(result, self.leaves, self.grad)
        return self.error_of([result.detach(), *gradients])

    def call(self, function: Any, passes: str) -> Callable[[], Any]:
        if passes == "both":
            return lambda: torch.autograd.grad(function(*self.inputs), self.leaves, self.grad)
        if passes == "forward":
            return torch.no_grad()(lambda: function(*self.inputs))
        result = function(*self.inputs)
        return lambda: torch.autograd.grad(result, self.leaves, self.grad, retain_graph=True)


def generator(spec: KernelSpec) -> torch.Generator:
    return torch.Generator(spec.device).manual_seed(spec.seed)


def compiled(function: Any) -> Any:
    """Compiles the function for static shapes, as in a training step.

    Donated buffers are turned off: timing the backward separately runs it many times on one graph,
    so it must not overwrite tensors that the forward saved.
    """
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined, unused-ignore]
    return torch.compile(function, dynamic=False)
