"""Linear layer and cross-entropy, compared with their peers.

Legend: N tokens, D model width, V vocabulary.
"""

import functools
from collections.abc import Callable

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
from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
from stepgauge.measure.accuracy import largest_error
from stepgauge.spec.kernel import LinearCrossEntropySpec

# Matrix products of N D V multiply-adds: the logits, then the gradients of hidden and of the
# weight.
PRODUCTS = {"forward": 1, "both": 3}
LOGIT_SPREAD = 2.0
MOST_LOGITS = 2**27  # number of float64 logits that the oracle holds at once
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), targets_N)


def _torch(spec: LinearCrossEntropySpec) -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return functools.partial(F.linear_cross_entropy, options=options)  # type: ignore[attr-defined, unused-ignore]


def _liger(spec: LinearCrossEntropySpec) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden_ND, weight_VD, targets_N: loss(weight_VD, hidden_ND, targets_N)


def _quack(spec: LinearCrossEntropySpec) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


IMPLEMENTATIONS = {
    "ours": Implementation(lambda spec: linear_cross_entropy),
    # Also ours: it is not a baseline and runs only if named.
    "ours-compiled": Implementation(
        lambda spec: compiled(linear_cross_entropy), error=lambda case, loss: case.error(loss)
    ),
    "eager": Implementation(lambda spec: eager),
    "compile": Implementation(lambda spec: compiled(eager)),
    "torch": Implementation(_torch),
    "liger": Implementation(_liger),
    "quack": Implementation(_quack),
}


class Case(Differentiable):
    def __init__(self, spec: LinearCrossEntropySpec):
        random = generator(spec)
        draw = functools.partial(
            torch.randn, device=spec.device, dtype=DTYPES[spec.dtype], generator=random
        )
        hidden_ND = draw(spec.tokens, spec.width)
        weight_VD = draw(spec.vocabulary, spec.width) * (LOGIT_SPREAD * spec.width**-0.5)
        targets_N = torch.randint(
            spec.vocabulary, (spec.tokens,), device=spec.device, generator=random
        )
        error_of = functools.partial(largest_error, exact_results(hidden_ND, weight_VD, targets_N))
        super().__init__(
            (hidden_ND.requires_grad_(), weight_VD.requires_grad_(), targets_N), None, error_of
        )


@torch.no_grad()
def exact_results(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> list[Tensor]:
    """Returns the loss and its gradients in float64. The formulas avoid 1 - p, which would lose
    digits even in float64.
    """
    exact_VD, count = weight_VD.double(), len(targets_N)
    loss = torch.zeros((), dtype=torch.float64, device=exact_VD.device)
    grad_hidden_ND = torch.empty(hidden_ND.shape, dtype=torch.float64, device=exact_VD.device)
    grad_weight_VD = torch.zeros_like(exact_VD)
    rows = max(1, MOST_LOGITS // len(exact_VD))
    for first in range(0, count, rows):
        hidden = hidden_ND[first : first + rows].double()
        index = targets_N[first : first + rows, None]
        logits = hidden @ exact_VD.T
        target = logits.gather(1, index)
        others = logits.scatter_(1, index, -torch.inf).logsumexp(1, keepdim=True)
        x = others - target
        cross_entropy = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
        loss += cross_entropy.sum() / count
        gradient = (
            logits.sub_(target + cross_entropy)
            .exp_()
            .scatter_(1, index, -torch.sigmoid(x))
            .div_(count)
        )
        grad_hidden_ND[first : first + rows] = gradient @ exact_VD
        grad_weight_VD.addmm_(gradient.T, hidden)
    return [loss, grad_hidden_ND, grad_weight_VD]


def num_flops(spec: LinearCrossEntropySpec, name: str) -> float:
    """Returns the FLOPs of the passes: 2 N D V per product."""
    return 2 * spec.tokens * spec.width * spec.vocabulary * PRODUCTS[spec.passes]


OPERATION = Operation(
    spec=LinearCrossEntropySpec,
    implementations=IMPLEMENTATIONS,
    case=Case,
    ceiling="matmul",
    work=num_flops,
    reduction=lambda spec: max(spec.tokens, spec.width, spec.vocabulary),
)
