"""AdamW's Triton kernel: one launch for any number of tensors.

The kernel finds its tensors through a table of addresses in device memory, and its share of the
work through a table of chunks. A chunk is CHUNK consecutive elements of one tensor. The arithmetic
is that of reference.py in float32. docs/log/2026-11-21-adamw.md has the design.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Rows of the address table, which has one column per tensor. The last row exists only with master
# weights.
TABLE_ROWS = ("param", "grad", "exp_avg", "exp_avg_sq", "step", "master")

# Types of a parameter and of its gradient; the moments are float32.
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


class Shape(NamedTuple):
    """Shape of a launch: elements per program, elements per loop iteration, warps."""

    chunk: int
    block: int
    num_warps: int


# By bytes per parameter: the fastest of about 40 candidates on an H100
# (benchmarks/kernels/sweep.py), 2026-11-21; 2.6 and 4.0 % faster than the previous shape.
SHAPES = {2: Shape(4096, 2048, 8), 4: Shape(2048, 2048, 8)}


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # The compiler does not know the alignment of an address from a table; without this hint, loads
    # are 4 bytes wide.
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    param_ptr, grad_ptr, avg_ptr, sq_ptr, master_ptr, offset, mask,
    inv_scale, decay, step_size, inv_denom_scale, one_minus_beta1, one_minus_beta2, eps,
    MAXIMIZE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """Runs reference.adamw_ on one block. The mask is None if the whole block is inside the
    tensor.
    """
    source = master_ptr if HAS_MASTER else param_ptr
    p = tl.load(source + offset, mask=mask).to(tl.float32)
    g = tl.load(grad_ptr + offset, mask=mask).to(tl.float32)
    m = tl.load(avg_ptr + offset, mask=mask)
    v = tl.load(sq_ptr + offset, mask=mask)
    if HAS_SCALE:
        # Like torch's optimizers, write the unscaled gradient back, because users log gradients.
        g = (g * inv_scale).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + offset, g, mask=mask)
        g = g.to(tl.float32)
    if MAXIMIZE:
        g = -g
    p -= decay * p
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g * g - v)
    p -= step_size * tl.div_rn(m, tl.sqrt_rn(v) * inv_denom_scale + eps)
    tl.store(param_ptr + offset, p.to(param_ptr.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master_ptr + offset, p, mask=mask)
    tl.store(avg_ptr + offset, m, mask=mask)
    tl.store(sq_ptr + offset, v, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_tensors", "lr", "log_beta1", "log_beta2", "one_minus_beta1", "one_minus_beta2",
        "eps", "weight_decay",
    ],
)  # fmt: skip
def adamw_kernel(
    chunk_ptr, numel_ptr, table_ptr, counter_ptr, lr_ptr, grad_scale_ptr, found_inf_ptr,
    num_tensors, lr, log_beta1, log_beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr,
    HAS_LR: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """Updates one chunk per program; chunk_ptr has (tensor, chunk within the tensor) for each
    program.

    The last program to finish increments every tensor's step, which all others have read by then.
    """
    pid = tl.program_id(0)
    tensor = tl.load(chunk_ptr + 2 * pid)
    start = tl.load(chunk_ptr + 2 * pid + 1).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(numel_ptr + tensor) - start, CHUNK).to(tl.int32)
    column = table_ptr + tensor
    step = tl.load(tl.load(column + 4 * num_tensors).to(tl.pointer_type(tl.float32)))
    take = True
    if HAS_FOUND_INF:
        take = tl.load(found_inf_ptr) == 0.0
    if take:
        param_ptr = _pointer(tl.load(column), PARAM_TYPE, ALIGNED) + start
        grad_ptr = _pointer(tl.load(column + num_tensors), GRAD_TYPE, ALIGNED) + start
        avg_ptr = _pointer(tl.load(column + 2 * num_tensors), tl.float32, ALIGNED) + start
        sq_ptr = _pointer(tl.load(column + 3 * num_tensors), tl.float32, ALIGNED) + start
        master_ptr = sq_ptr  # unused without master weights
        if HAS_MASTER:
            master_ptr = _pointer(tl.load(column + 5 * num_tensors), tl.float32, ALIGNED) + start
        if HAS_LR:
            lr = tl.load(lr_ptr).to(tl.float32)
        inv_scale = 1.0
        if HAS_SCALE:
            inv_scale = 1.0 / tl.load(grad_scale_ptr)
        # float64, which costs a few instructions per program, because 1 - beta2^t cancels for small
        # t.
        t = step.to(tl.float64) + 1.0
        correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
        correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
        step_size = lr / correction1
        inv_denom_scale = 1.0 / tl.sqrt_rn(correction2)
        decay = lr * weight_decay
        if left == CHUNK:
            for i in range(0, CHUNK, BLOCK):
                _update(
                    param_ptr, grad_ptr, avg_ptr, sq_ptr, master_ptr, i + tl.arange(0, BLOCK), None,
                    inv_scale, decay, step_size, inv_denom_scale,
                    one_minus_beta1, one_minus_beta2, eps, MAXIMIZE, HAS_SCALE, HAS_MASTER,
                )  # fmt: skip
        else:
            # A bound of unknown divisibility makes every access one element wide, so only the last
            # chunk of a tensor uses this loop.
            for i in range(0, left, BLOCK):
                offset = i + tl.arange(0, BLOCK)
                _update(
                    param_ptr, grad_ptr, avg_ptr, sq_ptr, master_ptr, offset, offset < left,
                    inv_scale, decay, step_size, inv_denom_scale,
                    one_minus_beta1, one_minus_beta2, eps, MAXIMIZE, HAS_SCALE, HAS_MASTER,
                )  # fmt: skip
    # All warps must have read `step` before this program counts as finished.
    tl.debug_barrier()
    finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        if take:
            for i in range(0, num_tensors, 128):
                index = i + tl.arange(0, 128)
                inside = index < num_tensors
                address = tl.load(table_ptr + 4 * num_tensors + index, mask=inside, other=0)
                steps = address.to(tl.pointer_type(tl.float32))
                tl.store(steps, tl.load(steps, mask=inside, other=0.0) + 1.0, mask=inside)
