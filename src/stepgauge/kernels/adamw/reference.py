"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) for one parameter in plain PyTorch: the oracle.

At step t, with gradient g, learning rate lr and weight decay d:

    p <- p - lr d p
    m <- m + (1 - beta1) (g - m)
    v <- v + (1 - beta2) (g^2 - v)
    p <- p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

m and v are float32 if the parameter's type is narrower, and otherwise have its type; the arithmetic
is done in their type. With a master weight, p is the master, and the parameter is its rounded copy.
"""

import torch
from torch import Tensor


def state_dtype(param: Tensor) -> torch.dtype:
    """Returns the type of a parameter's moments, which is at least float32."""
    return torch.promote_types(param.dtype, torch.float32)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    master: Tensor | None = None,
) -> None:
    """Updates the parameter and its state in place; ``step`` (fp32, a scalar) counts earlier steps.

    ``grad`` is divided by ``grad_scale`` in place. If ``found_inf`` is not zero, parameter and state
    keep their values. The host reads neither of these two tensors.
    """
    dtype = exp_avg.dtype
    if grad_scale is not None:
        grad.div_(grad_scale.to(grad))
    g = -grad.to(dtype) if maximize else grad.to(dtype)
    t = step.to(device=param.device, dtype=torch.float64) + 1
    # Scalars are float64, because 1 - beta2 and 1 - beta2^t lose digits in float32.
    step_size = (lr / (1 - beta1**t)).to(dtype)
    denom_scale = (1 - beta2**t).sqrt().to(dtype)

    old = (param if master is None else master).to(dtype)
    new_avg = exp_avg + (1 - beta1) * (g - exp_avg)
    new_avg_sq = exp_avg_sq + (1 - beta2) * (g * g - exp_avg_sq)
    decayed = old - lr * weight_decay * old
    new = decayed - step_size * new_avg / (new_avg_sq.sqrt() / denom_scale + eps)
    for tensor in (param,) if master is None else (param, master):
        _write(tensor, new, found_inf, old)
    for tensor, value in ((exp_avg, new_avg), (exp_avg_sq, new_avg_sq), (step, step + 1)):
        _write(tensor, value, found_inf)


def _write(
    tensor: Tensor, value: Tensor, found_inf: Tensor | None, otherwise: Tensor | None = None
) -> None:
    """Writes `value`; if `found_inf` is not zero `otherwise`, or nothing if that is None."""
    if found_inf is not None:
        skip = (found_inf.to(tensor.device) != 0).reshape(())
        value = torch.where(skip, tensor if otherwise is None else otherwise, value)
    tensor.copy_(value)
