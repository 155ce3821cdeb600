"""RMSNorm's host side: plans, the cheap eager launch, and the custom operators.

Two ways lead to the same kernels. In plain eager mode ``run_forward`` and ``run_backward`` launch
compiled kernels by address. Wherever something wants to see the operation (torch.compile, fake
tensors, a dispatch mode such as FlopCounterMode, a tensor subclass) they call the custom operators
``stepgauge::rms_norm``, ``rms_norm_residual`` and ``rms_norm_backward``, which Inductor looks into.
"""

import functools

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton
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
    """Launch forward on real tensors; return y, the stored sum (x itself without residual), rstd."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=out_dtype)
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x)
    else:
        total = None
    width = x.shape[-1]
    num_rows = x.numel() // width
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        plan = plan_for(x, weight, out_dtype, residual is not None)
        args = (x, residual, weight, y, total, rstd)
        _require_kernels(x)
        plan.forward((plan.forward_grid(num_rows), 1), args, (num_rows, eps))
    return y, x if total is None else total, rstd


def run_backward(
    dy: Tensor, h: Tensor, weight: Tensor, rstd: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch backward on real tensors; return the gradients of h and of the weight."""
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
    args = (dy, h, weight, rstd, dsum, dx, partial)
    _require_kernels(h)
    plan.backward((grid, plan.splits), args, (num_rows,))
    plan.reduce((plan.reduce_grid, 1), (partial, dw), (grid,))
    return dx, dw


def _require_kernels(x: Tensor):
    if not x.is_cuda and hasattr(forward_kernel, "warmup") and not _interpreted(forward_kernel):
        raise ValueError(
            "RMSNormTriton needs CUDA tensors, got a CPU tensor "
            "(rms_norm takes either; TRITON_INTERPRET=1 runs the kernels on the CPU)"
        )


def _interpreted(kernel) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


# The custom operators: the same launches, spelled so that torch.compile can follow them.


def _wrapped(kernel, launch: Launch, grid: tuple, *args):
    runner = kernel if _interpreted(kernel) else wrap_triton(kernel)
    runner[grid](*args, **launch.constants, **launch.options)


def _forward_traceable(x, residual, weight, eps, out_dtype):
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=out_dtype)
    total = None
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty_like(x)
    num_rows = x.numel() // x.shape[-1]
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    plan = plan_for(x, weight, out_dtype, residual is not None)
    args = (x, residual, weight, y, total, rstd, num_rows, eps)
    grid = (plan.forward_grid(num_rows), 1, 1)
    if plan.fwd.wide:
        _wrapped(forward_wide_kernel, plan.forward, grid, *args)
    else:
        _wrapped(forward_kernel, plan.forward, grid, *args)
    return y, total, rstd


@triton_op("stepgauge::rms_norm", mutates_args={})
def rms_norm_op(
    x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward_traceable(x, None, weight, eps, out_dtype)
    return y, rstd


@triton_op("stepgauge::rms_norm_residual", mutates_args={})
def rms_norm_residual_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_traceable(x, residual, weight, eps, out_dtype)


@triton_op("stepgauge::rms_norm_backward", mutates_args={})
def rms_norm_backward_op(
    dy: Tensor, h: Tensor, weight: Tensor, rstd: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor]:
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    if dsum is not None:
        dsum = dsum.contiguous()
    num_rows = rstd.numel()
    plan = plan_for(h, weight, dy.dtype, dsum is not None)
    # At least one program, so that dw is written when there is no row.
    grid = max(1, plan.backward_grid(num_rows))
    dx, dw = torch.empty_like(h), torch.empty_like(weight)
    partial = torch.empty((grid, plan.width), dtype=torch.float32, device=h.device)
    args = (dy, h, weight, rstd, dsum, dx, partial, num_rows)
    if plan.bwd.blocks:
        _wrapped(backward_wide_kernel, plan.backward, (grid, plan.splits, 1), *args)
    else:
        _wrapped(backward_kernel, plan.backward, (grid, 1, 1), *args)
    _wrapped(reduce_kernel, plan.reduce, (plan.reduce_grid, 1, 1), partial, dw, grid)
    return dx, dw


def _setup(ctx, inputs, output):
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _drstd):
    x, weight, rstd = ctx.saved_tensors
    dx, dw = rms_norm_backward_op(dy, x, weight, rstd, None)
    return dx, dw, None, None


def _setup_residual(ctx, inputs, output):
    _, total, rstd = output
    ctx.save_for_backward(total, inputs[2], rstd)


def _backward_residual(ctx, dy, dsum, _drstd):
    total, weight, rstd = ctx.saved_tensors
    dx, dw = rms_norm_backward_op(dy, total, weight, rstd, dsum)
    return dx, dx, dw, None, None


rms_norm_op.register_autograd(_backward, setup_context=_setup)
rms_norm_residual_op.register_autograd(_backward_residual, setup_context=_setup_residual)


# torch's counter counts matrix products only; F.rms_norm counts as none, and so does this, so that
# swapping the norm leaves a model's FLOPs and its MFU as they were.
@register_flop_formula(
    [
        torch.ops.stepgauge.rms_norm,
        torch.ops.stepgauge.rms_norm_residual,
        torch.ops.stepgauge.rms_norm_backward,
    ]
)
def _no_flops(*args, **kwargs) -> int:
    return 0
