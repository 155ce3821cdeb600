"""The operator stepgauge::adamw_ and its launch: AdamW on lists of tensors of one device and type.

``masters`` is empty, or has a float32 master weight for each parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import adamw_

try:
    from . import tables as _tables
except ImportError:  # without Triton, the reference runs instead
    _tables = None

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op(
    "stepgauge::adamw_",
    mutates_args=("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "masters"),
)
def _adamw_op(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    options = {
        "lr": lr if lr_tensor is None else lr_tensor, "beta1": beta1, "beta2": beta2, "eps": eps,
        "weight_decay": weight_decay, "maximize": maximize, "grad_scale": grad_scale, "found_inf": found_inf,
    }  # fmt: skip
    rows = (params, grads, exp_avgs, exp_avg_sqs, steps, *([masters] if masters else []))
    columns = list(zip(*rows, strict=True))
    types = {(p.device, p.dtype, g.dtype) for p, g in zip(params, grads, strict=True)}
    if len(types) == 1 and all(_ready_for_kernel(*column) for column in columns):
        chunk = _tables.shape_for(params[0].dtype).chunk
        tables = _tables.Tables([p.numel() for p in params], params[0].device, chunk=chunk)
        dtypes = (params[0].dtype, grads[0].dtype)
        launch(tables, _tables.addresses_of(*rows), dtypes, options)
        return
    for column in columns:
        adamw_(*column[:5], master=column[5] if masters else None, **options)


@_adamw_op.register_fake
def _(*args, **kwargs) -> None:
    return None


def launch(tables, addresses: list[int], dtypes: tuple, options: dict) -> None:
    """Launches the kernel on the tables' device, with tensor options moved to it."""
    device = tables.device
    options = dict(options)
    for name in ("lr", "grad_scale", "found_inf"):
        if isinstance(options[name], Tensor) and options[name].device != device:
            # Reading a learning rate on the CPU does not wait; other tensors are copied to the
            # device asynchronously.
            value = options[name]
            on_host = name == "lr" and value.device.type == "cpu"
            options[name] = value.item() if on_host else value.to(device, non_blocking=True)
    args = (tables, addresses, *dtypes)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _tables.launch(*args, **options)
    else:
        _tables.launch(*args, **options)


def op_options(options: dict) -> dict:
    lr = options["lr"]
    is_tensor = isinstance(lr, Tensor)
    return options | {"lr": 0.0 if is_tensor else lr, "lr_tensor": lr if is_tensor else None}


def _on_kernel_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def kernel_takes(param: Tensor, grad: Tensor) -> bool:
    return (
        _tables is not None
        and _on_kernel_device(param)
        and grad.device == param.device
        and param.dtype in _KERNEL_DTYPES
        and grad.dtype in _KERNEL_DTYPES
        and (param.is_contiguous() or _dense(param))
    )


def _ready_for_kernel(param, grad, exp_avg, exp_avg_sq, step, *master) -> bool:
    states = (exp_avg, exp_avg_sq, *master)
    return (
        kernel_takes(param, grad)
        and step.dtype == torch.float32
        and all(t.dtype == torch.float32 for t in states)
        and all(t.stride() == param.stride() for t in (grad, *states))
        and step.device == param.device
    )


def _dense(tensor: Tensor) -> bool:
    """True if the elements fill one block of memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
