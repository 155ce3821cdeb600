"""A step of AdamW over many parameters, compared with its peers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.bench.kernels.operation import (
    DTYPES,
    Implementation,
    Operation,
    generator,
)
from stepgauge.kernels.adamw import FusedAdamW
from stepgauge.measure.accuracy import largest_error
from stepgauge.spec.kernel import AdamWSpec

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS_CHECKED = 20
# The check uses a few parameters with odd sizes: a float64 copy of all parameters may not fit.
SHAPES_CHECKED = [(1000, 513), (7,), (40_000,), (1280, 16)]
Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

IMPLEMENTATIONS = {
    "ours": Implementation(lambda spec: functools.partial(FusedAdamW, **HYPER)),
    "torch": Implementation(lambda spec: functools.partial(torch.optim.AdamW, **HYPER, fused=True)),
    "foreach": Implementation(
        lambda spec: functools.partial(torch.optim.AdamW, **HYPER, foreach=True)
    ),
    # Ours with fp32 master weights. It is not a baseline for ours and runs only if named.
    "masters": Implementation(
        lambda spec: functools.partial(FusedAdamW, **HYPER, master_weights=True),
        error=lambda case, function: case.error(function),
    ),
}


class Case:
    """Parameters with gradients; an implementation builds its optimizer over them."""

    def __init__(self, spec: AdamWSpec):
        self.draw = functools.partial(
            torch.randn, device=spec.device, dtype=DTYPES[spec.dtype], generator=generator(spec)
        )
        self.parameters = self._with_gradients(spec.tensor_shapes)

    def error(self, function: Build) -> float:
        """Returns the largest relative error after several steps with different gradients, compared
        with torch's optimizer in float64.
        """
        parameters = self._with_gradients(SHAPES_CHECKED)
        exact = [torch.nn.Parameter(p.detach().double()) for p in parameters]
        optimizer, oracle = function(parameters), torch.optim.AdamW(exact, **HYPER)
        for _ in range(STEPS_CHECKED):
            for parameter, exact_parameter in zip(parameters, exact, strict=True):
                parameter.grad = self.draw(parameter.shape)
                exact_parameter.grad = parameter.grad.double()
            optimizer.step()
            oracle.step()
        return largest_error(exact, parameters)

    def call(self, function: Build, passes: str) -> Callable[[], Any]:
        """Returns the optimizer's step, with its state already created."""
        optimizer = function(self.parameters)
        optimizer.step()
        return optimizer.step

    def _with_gradients(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(self.draw(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = self.draw(parameter.shape)
        return parameters


def num_bytes(spec: AdamWSpec, name: str) -> float:
    """Returns the bytes that a step reads and writes: parameter and two moments are read and written,
    the gradient is read. Ours keeps the moments in fp32, torch in the parameter's dtype. With master
    weights, these are read and written, and the parameter is only written.
    """
    itemsize = DTYPES[spec.dtype].itemsize
    if name == "masters" and itemsize < 4:
        return spec.num_parameters * (2 * itemsize + 6 * 4)
    moment = 4 if name in ("ours", "masters") else itemsize
    return spec.num_parameters * (3 * itemsize + 4 * moment)


OPERATION = Operation(
    spec=AdamWSpec,
    implementations=IMPLEMENTATIONS,
    case=Case,
    ceiling="copy",
    work=num_bytes,
    reduction=lambda spec: 1,
)
