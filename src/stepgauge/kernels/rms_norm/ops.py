"""RMSNorm's host side: the launches for each width and type, and the custom operators.

``run_forward`` and ``run_backward`` launch the compiled kernels by address, and plain eager calls
use them directly. torch.compile, fake tensors, dispatch modes such as FlopCounterMode and tensor
subclasses need an operator: for them the same functions are registered as
``stepgauge::rms_norm`` and ``rms_norm_backward``.
"""

import functools

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepgauge.kernels.launch import Launch

from . import triton as kernels
from .triton import (
    backward_kernel,
    backward_wide_kernel,
    forward_kernel,
    forward_wide_kernel,
    reduce_kernel,
)

# The number of SMs assumed when tests run the kernels on a CPU, in Triton's interpreter.
_INTERPRETER_SMS = 3


class NormLaunches:
    """The three launches for one width, set of types and device."""

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        num_sms: int,
        shared_bytes: int = 227 * 1024,
        *,
        forward: "kernels.ForwardConfig | None" = None,
        backward: "kernels.BackwardConfig | None" = None,
    ):
        itemsize = dtype.itemsize
        self.width = width
        self.fwd = forward or kernels.forward_config(width, itemsize)
        self.bwd = (backward or kernels.backward_config(width, itemsize)).fitted(
            itemsize, shared_bytes=shared_bytes
        )
        self.max_programs = num_sms * self.bwd.programs_per_sm
        self.splits = 1
        self.forward = self._forward_launch()
        self.backward = self._backward_launch(itemsize)
        self.reduce_grid = _ceil_div(width, kernels.REDUCE_BLOCK)
        self.reduce = Launch(
            reduce_kernel,
            WIDTH=width,
            BLOCK=kernels.REDUCE_BLOCK,
            BLOCK_P=kernels.REDUCE_BLOCK_P,
            num_warps=kernels.REDUCE_WARPS,
        )

    def _forward_launch(self) -> Launch:
        c = self.fwd
        if c.wide:
            return Launch(
                forward_wide_kernel, WIDTH=self.width, BLOCK=c.block, num_warps=c.num_warps
            )
        return Launch(
            forward_kernel, WIDTH=self.width, BLOCK=c.block, ROWS=c.rows, num_warps=c.num_warps
        )

    def _backward_launch(self, itemsize: int) -> Launch:
        c = self.bwd
        if c.blocks:
            self.splits = _ceil_div(self.width, c.block * c.blocks)
            self.max_programs = max(1, self.max_programs // self.splits)
            return Launch(
                backward_wide_kernel, WIDTH=self.width, BLOCK=c.block, BLOCKS=c.blocks,
                num_warps=c.num_warps,
            )  # fmt: skip
        return Launch(
            backward_kernel, WIDTH=self.width, BLOCK=c.block, ROWS=c.rows,
            FOLD=c.fold(itemsize), KEEP_WEIGHT=c.keep_weight, STAGES=c.stages,
            num_warps=c.num_warps,
        )  # fmt: skip

    def forward_grid(self, num_rows: int) -> int:
        return _ceil_div(num_rows, self.fwd.rows)

    def backward_grid(self, num_rows: int) -> int:
        return min(self.max_programs, _ceil_div(num_rows, self.bwd.rows))


def _ceil_div(a, b):
    return (a + b - 1) // b


@functools.cache
def limits(device: torch.device) -> tuple[int, int]:
    """Returns the number of SMs, and the bytes of shared memory that one program may use."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _INTERPRETER_SMS, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    # Every GPU since sm_80 has at least 99 KiB.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return properties.multi_processor_count, shared_bytes


_PLANS: dict = {}


def plan_for(x: Tensor, weight: Tensor, other_dtype: torch.dtype) -> NormLaunches:
    """Returns the launches for a tensor like x. `other_dtype` is the type of forward's output, or
    of the gradient in backward.
    """
    # int makes a width that torch.compile considers dynamic a constant of its graph.
    width = int(x.shape[-1])
    key = (x.device, x.dtype, weight.dtype, other_dtype, width)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = NormLaunches(width, x.dtype, *limits(x.device))
    return plan


def run_forward(
    x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns y, and rstd, which has one fp32 value per row."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=out_dtype)
    num_rows = x.numel() // x.shape[-1]
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        plan = plan_for(x, weight, out_dtype)
        _require_cuda(x)
        plan.forward((plan.forward_grid(num_rows), 1), (x, weight, y, rstd), (num_rows, eps))
    return y, rstd


def run_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    num_rows = rstd.numel()
    if not num_rows:
        return torch.empty_like(x), torch.zeros_like(weight)
    plan = plan_for(x, weight, dy.dtype)
    grid = plan.backward_grid(num_rows)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    partial = torch.empty((grid, plan.width), dtype=torch.float32, device=x.device)
    _require_cuda(x)
    plan.backward((grid, plan.splits), (dy, x, weight, rstd, dx, partial), (num_rows,))
    plan.reduce((plan.reduce_grid, 1), (partial, dw), (grid,))
    return dx, dw


def _require_cuda(x: Tensor):
    is_interpreted = type(forward_kernel).__name__ == "InterpretedFunction"
    if not x.is_cuda and not is_interpreted:
        raise ValueError(
            "RMSNormTriton needs CUDA tensors, got a CPU tensor "
            "(rms_norm accepts both; TRITON_INTERPRET=1 runs the kernels on the CPU)"
        )


rms_norm_op = torch.library.custom_op("stepgauge::rms_norm", run_forward, mutates_args=())
rms_norm_backward_op = torch.library.custom_op(
    "stepgauge::rms_norm_backward", run_backward, mutates_args=()
)


@rms_norm_op.register_fake
def _(x, weight, eps, out_dtype):
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@rms_norm_backward_op.register_fake
def _(dy, x, weight, rstd):
    form = torch.contiguous_format
    return torch.empty_like(x, memory_format=form), torch.empty_like(weight, memory_format=form)


def _setup(ctx, inputs, output):
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _drstd):
    return (*rms_norm_backward_op(dy, *ctx.saved_tensors), None, None)


rms_norm_op.register_autograd(_backward, setup_context=_setup)


# torch's counter counts only matrix products and nothing for F.rms_norm. The same here, so that
# replacing the norm does not change a model's FLOPs and MFU.
@register_flop_formula([torch.ops.stepgauge.rms_norm, torch.ops.stepgauge.rms_norm_backward])
def _no_flops(*args, **kwargs) -> int:
    return 0
