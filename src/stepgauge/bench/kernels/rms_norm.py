"""RMSNorm, compared with its peers."""

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.bench.kernels.operation import (
    DTYPES,
    Differentiable,
    Implementation,
    Operation,
    compiled,
    generator,
)
from stepgauge.kernels.rms_norm import backward_input, backward_weight, reference, rms_norm
from stepgauge.measure.accuracy import largest, largest_error, relative_error
from stepgauge.spec.kernel import RmsNormSpec

EPS = 1e-5
# Fewest tensors of the input's size that a pass reads or writes.
TENSORS = {"forward": 2, "backward": 3, "both": 5}
# The oracle computes y and dx for every 97th row: all rows in float64 may not fit.
ROW_STEP = 97
Norm = Callable[[Tensor, Tensor], Tensor]


def _liger(spec: RmsNormSpec) -> Norm:
    from liger_kernel.transformers.functional import liger_rms_norm

    # in_place would overwrite the gradient, which every timed call uses.
    return lambda x, w: liger_rms_norm(x, w, EPS, in_place=False)


def _quack(spec: RmsNormSpec) -> Norm:
    norm = importlib.import_module("quack.rmsnorm").rmsnorm
    return lambda x, w: norm(x, w, eps=EPS)


def _layer_norm(spec: RmsNormSpec) -> Norm:
    bias = torch.zeros(spec.width, device=spec.device, dtype=DTYPES[spec.dtype])
    return lambda x, w: F.layer_norm(x, (spec.width,), w, bias, EPS)


def _layer_norm_error(case: "Case", function: Norm) -> float:
    """Returns the largest relative error of y and dx on the checked rows."""
    (x, weight), grad = case.inputs, case.grad
    assert grad is not None
    checked_x = x.detach()[::ROW_STEP].double().requires_grad_()
    exact_y = F.layer_norm(checked_x, weight.shape, weight.detach().double(), None, EPS)
    (exact_dx,) = torch.autograd.grad(exact_y, checked_x, grad[::ROW_STEP].double())
    y = function(x, weight)
    (dx,) = torch.autograd.grad(y, x, grad)
    return largest(
        [relative_error(y[::ROW_STEP], exact_y), relative_error(dx[::ROW_STEP], exact_dx)]
    )


IMPLEMENTATIONS = {
    "ours": Implementation(lambda spec: lambda x, w: rms_norm(x, w, EPS)),
    "eager": Implementation(lambda spec: lambda x, w: reference.forward(x, w, EPS)),
    "torch": Implementation(lambda spec: lambda x, w: F.rms_norm(x, (spec.width,), w, EPS)),
    "compile": Implementation(lambda spec: compiled(lambda x, w: reference.forward(x, w, EPS))),
    "liger": Implementation(_liger),
    "quack": Implementation(_quack),
    "layer_norm": Implementation(_layer_norm, error=_layer_norm_error),
}


class Case(Differentiable):
    def __init__(self, spec: RmsNormSpec):
        dtype, random = DTYPES[spec.dtype], generator(spec)
        draw = functools.partial(torch.randn, device=spec.device, dtype=dtype, generator=random)
        x = draw(spec.rows, spec.width).requires_grad_()
        weight = draw(spec.width).requires_grad_()
        grad = draw(spec.rows, spec.width)
        exact = _exact_results(x.detach(), weight.detach(), grad)
        super().__init__((x, weight), grad, functools.partial(_error, exact))


def _exact_results(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns y and dx on the checked rows, and dw over all rows, in float64."""
    exact_weight = weight.double()
    rows = max(1, 2**27 // x.shape[1])
    dw = sum(
        backward_weight(grad_rows.double(), x_rows.double(), exact_weight, EPS)
        for grad_rows, x_rows in zip(grad.split(rows), x.split(rows), strict=True)
    )
    checked_x, checked_grad = x[::ROW_STEP].double(), grad[::ROW_STEP].double()
    return [
        reference.forward(checked_x, exact_weight, EPS),
        backward_input(checked_grad, checked_x, exact_weight, EPS),
        torch.as_tensor(dw),
    ]


def _error(exact: Sequence[Tensor], results: Sequence[Tensor]) -> float:
    y, dx, dw = results
    return largest_error(exact, (y[::ROW_STEP], dx[::ROW_STEP], dw))


def num_bytes(spec: RmsNormSpec, name: str) -> float:
    """Returns the fewest bytes that the passes read and write."""
    return TENSORS[spec.passes] * spec.rows * spec.width * DTYPES[spec.dtype].itemsize


OPERATION = Operation(
    spec=RmsNormSpec,
    implementations=IMPLEMENTATIONS,
    case=Case,
    ceiling="copy",
    work=num_bytes,
    reduction=lambda spec: max(spec.rows, spec.width),
)
