"""What an operation is to the benchmark: its implementations, its inputs with their oracle, and how
it is rated.
"""

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
    """The inputs of one shape, and what a right result is."""

    def error(self, function: Any) -> float:
        """The largest relative error of a result and of its gradients against float64."""

    def call(self, function: Any, passes: str) -> Callable[[], Any]:
        """What is timed; it returns what the implementation gives, and leaves nothing else behind."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """make    gives the function for a spec; raises ImportError or ValueError where it cannot be
               had
    around  the context in which the function is called, entered outside of what is timed
    error   how wrong it is, where it computes something else than ours: then it is no baseline,
            and runs only if named
    """

    make: Callable[[Any], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    error: Callable[[Any, Any], float] | None = None

    @property
    def is_baseline(self) -> bool:
        return self.error is None


@dataclasses.dataclass(frozen=True)
class Operation:
    """spec             its KernelSpec
    implementations  by name, ours first
    case             the inputs of a spec, on its device
    ceiling          what it is held against: "copy" (work in bytes) or "matmul" (work in FLOPs)
    work             bytes or FLOPs of a spec in the implementation of that name
    reduction        the longest sum in it: what its rounding grows with
    """

    spec: type[KernelSpec]
    implementations: Mapping[str, Implementation]
    case: Callable[[Any], Case]
    ceiling: str
    work: Callable[[Any, str], float]
    reduction: Callable[[Any], int]


class Differentiable:
    """A function of tensors with one result, and its gradients with respect to the `leaves` among
    the inputs.

    `judge` takes [result, *gradients] and returns the largest relative error.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        grad: Tensor | None,
        judge: Callable[[Sequence[Tensor]], float],
    ):
        self.inputs = inputs
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self.grad = grad
        self.judge = judge

    def error(self, function: Any) -> float:
        result = function(*self.inputs)
        return self.judge([result.detach(), *torch.autograd.grad(result, self.leaves, self.grad)])

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
    """torch.compile for this shape alone, as a training step with one shape has it.

    Its backward may be timed alone, on a graph that is kept, and so must not write into what the
    forward saved.
    """
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined, unused-ignore]
    return torch.compile(function, dynamic=False)
