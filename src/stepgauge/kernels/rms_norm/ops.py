"""RMSNorm's host side: plans, the cheap eager launch, and the custom operators.

``run_forward`` and ``run_backward`` launch compiled kernels by address: what plain eager calls run.
Wherever something wants to see the operation (torch.compile, fake tensors, a dispatch mode such as
FlopCounterMode, a tensor subclass) the same functions are the custom operators
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

# What a CPU run of the kernels (Triton's interpreter, for tests) takes for the number of SMs.
_INTERPRETER_SMS = 3


class NormLaunches:
    """The three launches for one width, its types and a device."""

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        num_sms: int,
        shared_bytes: int = 227 * 1024,
        *,
        has_residual: bool = False,
        has_dsum: bool = False,
        forward: "kernels.ForwardConfig | None" = None,
        backward: "kernels.BackwardConfig | None" = None,
    ):
        itemsize = dtype.itemsize
        self.width = width
        self.fwd = forward or kernels.forward_config(width, itemsize)
        self.bwd = (backward or kernels.backward_config(width, itemsize)).fitted(
            itemsize, has_dsum=has_dsum, shared_bytes=shared_bytes
        )
        self.max_programs = num_sms * self.bwd.programs_per_sm
        self.splits = 1
        self.forward = self._forward_launch(has_residual)
        self.backward = self._backward_launch(has_dsum, itemsize)
        self.reduce_grid = _ceil_div(width, kernels.REDUCE_BLOCK)
        self.reduce = Launch(
            reduce_kernel,
            WIDTH=width,
            BLOCK=kernels.REDUCE_BLOCK,
            BLOCK_P=kernels.REDUCE_BLOCK_P,
            num_warps=kernels.REDUCE_WARPS,
        )

    def _forward_launch(self, has_residual: bool) -> Launch:
        c = self.fwd
        if c.wide:
            return Launch(
                forward_wide_kernel, WIDTH=self.width, BLOCK=c.block, HAS_RESIDUAL=has_residual,
                num_warps=c.num_warps,
            )  # fmt: skip
        return Launch(
            forward_kernel, WIDTH=self.width, BLOCK=c.block, ROWS=c.rows,
            HAS_RESIDUAL=has_residual, num_warps=c.num_warps,
        )  # fmt: skip

    def _backward_launch(self, has_dsum: bool, itemsize: int) -> Launch:
        c = self.bwd
        if c.blocks:
            self.splits = _ceil_div(self.width, c.block * c.blocks)
            self.max_programs = max(1, self.max_programs // self.splits)
            return Launch(
                backward_wide_kernel, WIDTH=self.width, BLOCK=c.block, BLOCKS=c.blocks,
                HAS_DSUM=has_dsum, num_warps=c.num_warps,
            )  # fmt: skip
        return Launch(
            backward_kernel, WIDTH=self.width, BLOCK=c.block, ROWS=c.rows,
            FOLD=c.fold(itemsize), KEEP_WEIGHT=c.keep_weight, STREAM=c.stream, HAS_DSUM=has_dsum,
            STAGES=c.stages, num_warps=c.num_warps,
        )  # fmt: skip

    def forward_grid(self, num_rows: int) -> int:
        return _ceil_div(num_rows, self.fwd.rows)

    def backward_grid(self, num_rows: int) -> int:
        return min(self.max_programs, _ceil_div(num_rows, self.bwd.rows))


def _ceil_div(a, b):
    return (a + b - 1) // b


@functools.cache
def limits(device: torch.device) -> tuple[int, int]:
    """Number of SMs and the bytes of shared memory that one program may have."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _INTERPRETER_SMS, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    # 99 KiB is what every GPU since sm_80 gives.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return properties.multi_processor_count, shared_bytes


_PLANS: dict = {}


def plan_for(h: Tensor, weight: Tensor, other_dtype: torch.dtype, extra: bool) -> NormLaunches:
    """The plan for a tensor like h. ``extra``: residual in forward, its gradient in backward."""
    # One plan holds launches for one set of types; forward's output type or the gradient's type
    # is `other_dtype`, so that forward and backward of one call usually share a plan.
    # int: a width that torch.compile took for dynamic becomes a constant of its graph.
    width = int(h.shape[-1])
    key = (h.device, h.dtype, weight.dtype, other_dtype, width, extra)
    plan = _PLANS.get(key)
    if plan is None:
        plan = NormLaunches(width, h.dtype, *limits(h.device), has_residual=extra, has_dsum=extra)
        _PLANS[key] = plan
    return plan


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the sum of x and residual (empty without one), and rstd, one fp32 a row."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=out_dtype)
    total = None
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty_like(x)
    num_rows = x.numel() // x.shape[-1]
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        plan = plan_for(x, weight, out_dtype, residual is not None)
        _require_cuda(x)
        args = (x, residual, weight, y, total, rstd)
        plan.forward((plan.forward_grid(num_rows), 1), args, (num_rows, eps))
    return y, x.new_empty(0) if total is None else total, rstd


def run_backward(
    dy: Tensor, h: Tensor, weight: Tensor, rstd: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of h and of the weight; dsum is that of the sum where forward gave one."""
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    num_rows = rstd.numel()
    if not num_rows:
        return torch.empty_like(h), torch.zeros_like(weight)
    if dsum is not None:
        dsum = dsum.contiguous()
    plan = plan_for(h, weight, dy.dtype, dsum is not None)
    grid = plan.backward_grid(num_rows)
    dx, dw = torch.empty_like(h), torch.empty_like(weight)
    partial = torch.empty((grid, plan.width), dtype=torch.float32, device=h.device)
    _require_cuda(h)
    plan.backward((grid, plan.splits), (dy, h, weight, rstd, dsum, dx, partial), (num_rows,))
    plan.reduce((plan.reduce_grid, 1), (partial, dw), (grid,))
    return dx, dw


def _require_cuda(x: Tensor):
    is_interpreted = type(forward_kernel).__name__ == "InterpretedFunction"
    if not x.is_cuda and not is_interpreted:
        raise ValueError(
            "RMSNormTriton needs CUDA tensors, got a CPU tensor "
            "(rms_norm takes either; TRITON_INTERPRET=1 runs the kernels on the CPU)"
        )


rms_norm_op = torch.library.custom_op("stepgauge::rms_norm", run_forward, mutates_args=())
rms_norm_backward_op = torch.library.custom_op(
    "stepgauge::rms_norm_backward", run_backward, mutates_args=()
)


@rms_norm_op.register_fake
def _(x, residual, weight, eps, out_dtype):
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    total = x.new_empty(0) if residual is None else torch.empty_like(y, dtype=x.dtype)
    return y, total, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@rms_norm_backward_op.register_fake
def _(dy, h, weight, rstd, dsum):
    form = torch.contiguous_format
    return torch.empty_like(h, memory_format=form), torch.empty_like(weight, memory_format=form)


def _setup(ctx, inputs, output):
    x, residual, weight, _, _ = inputs
    _, total, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(total if ctx.has_residual else x, weight, rstd)


def _backward(ctx, dy, dsum, _drstd):
    h, weight, rstd = ctx.saved_tensors
    dx, dw = rms_norm_backward_op(dy, h, weight, rstd, dsum if ctx.has_residual else None)
    return dx, dx if ctx.has_residual else None, dw, None, None


rms_norm_op.register_autograd(_backward, setup_context=_setup)


# torch's counter counts matrix products only; F.rms_norm counts as none, and so does this, so that
# swapping the norm leaves a model's FLOPs and its MFU as they were.
@register_flop_formula([torch.ops.stepgauge.rms_norm, torch.ops.stepgauge.rms_norm_backward])
def _no_flops(*args, **kwargs) -> int:
    return 0
