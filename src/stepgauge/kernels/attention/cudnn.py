"""Attention by torch's cuDNN, for the shapes where it was measured faster than the kernels here.

The table says which pass of which shapes. cuDNN's two operators stand in the place of a launch, below
autograd: what is differentiated, compiled, cast and refused does not depend on who computes, and a
forward of ours hands its log-sum-exp to a backward of cuDNN's. Heads between two widths of cuDNN's are
padded with zeros.

cuDNN adds dq up in any order. `torch.use_deterministic_algorithms(True)`, STEPGAUGE_CUDNN=0 and
`torch.backends.cuda.enable_cudnn_sdp(False)` leave every shape to the kernels here.

docs/log/2026-11-22-handed-over.md has the figures and what was weighed.
"""

import collections
import functools
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, cudnn_sdp_enabled

OPT_OUT = "STEPGAUGE_CUDNN"
ARCH, DTYPES = 90, (torch.bfloat16, torch.float16)


class Measured(NamedTuple):
    """Milliseconds of one pass of batch x heads x length, bf16, causal, in one process:
    benchmarks/results/2026-11-22-h200-handed-over.jsonl and 2026-11-21-h200-kernels-second.jsonl.
    """

    gpu: str
    shape: tuple[int, int, int]
    ours_ms: float
    cudnn_ms: float


class Row(NamedTuple):
    """A pass that cuDNN runs: of heads `narrowest` to `widest`, computed `padded_to` wide, of at
    least `least_length` queries and keys, and `least_queries` in all heads and sequences.
    """

    passes: str
    narrowest: int
    widest: int
    padded_to: int
    least_length: int
    least_queries: int
    measured: tuple[Measured, ...]


# Everything else is faster here or was not measured. With few heads a loop of ours is split over the
# chip: one head of 16,384 is faster here (0.225 ms, cuDNN 0.393), one of 32,768 is not.
TABLE = (
    Row("forward", 129, 256, 256, 512, 16384, (Measured("H200", (2, 8, 4096), 0.410, 0.268),)),
    Row("backward", 129, 256, 256, 512, 16384, (Measured("H200", (2, 8, 4096), 2.76, 1.02),)),
    Row(
        "backward", 128, 128, 128, 8192, 32768,
        (
            Measured("H200", (2, 16, 8192), 2.89, 2.73),
            Measured("H200", (1, 16, 16384), 5.75, 5.17),
            Measured("H200", (1, 1, 32768), 1.34, 1.18),
        ),
    ),
    Row(
        "backward", 64, 64, 64, 4096, 32768,
        (
            Measured("H200", (2, 32, 8192), 3.70, 3.29),
            Measured("H200", (1, 16, 16384), 3.67, 3.23),
            Measured("H200", (1, 1, 32768), 0.867, 0.796),
        ),
    ),
)  # fmt: skip


def is_allowed():
    """Whether the process lets cuDNN take what the table gives it."""
    return (
        os.environ.get(OPT_OUT) != "0"
        and cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def row_of(passes, key):
    """The table's row for the launch, or None."""
    is_offered = (
        key.may_use_cudnn
        and key.chip.arch == ARCH
        and not (key.is_bounded or key.overrides or key.num_splits)
    )
    return row_for(passes, key.dtype, key.q.shape, key.k.shape[2]) if is_offered else None


def row_for(passes, dtype, shape, num_keys):
    """The table's row for queries of that shape without a window, or None."""
    batch, heads, length, width = shape
    # where lengths differ, causal masks have two corners to start from
    if dtype not in DTYPES or num_keys != length:
        return None
    for row in TABLE:
        fits = row.passes == passes and row.narrowest <= width <= row.widest
        if fits and length >= row.least_length and batch * heads * length >= row.least_queries:
            return row
    return None


def backward_bytes(arguments):
    """What cuDNN's backward takes beside its results, of the operator's arguments on Hopper, where
    it runs them: dq in fp32, a number a row, and copies of narrower heads.
    """
    _, q, k, _, _, lse, _, _, *bounds = arguments
    row = None if any(bounds) else row_for("backward", q.dtype, q.shape, k.shape[2])
    if row is None or not is_allowed():
        return 0
    columns, copies = row.padded_to, 0
    if columns != q.shape[3]:  # q, do, o and dq; k, v, dk and dv
        rows = 4 * (q[..., 0].numel() + k[..., 0].numel())
        copies = rows * columns * q.element_size()
    return 4 * lse.numel() * (columns + 1) + copies


calls: collections.Counter[str] = collections.Counter()  # that cuDNN ran, by pass
_refusals: dict[
    tuple, str | None
] = {}  # by launch, why torch or cuDNN does not take it; None: it does


def forward(key, q, k, v):
    """(o, log-sum-exp) by cuDNN, or None where the kernels here run."""
    return _tried("forward", key, _forward, q, k, v)


def backward(key, do, q, k, v, o, lse):
    """(dq, dk, dv) by cuDNN, or None where the kernels here run."""
    return _tried("backward", key, lambda *given: _backward(*given, lse), q, k, v, do, o)


def _tried(passes, key, run, *tensors):
    row, launch = row_of(passes, key), (passes, key)
    if row is None or _refusals.get(launch):
        return None
    tensors = [_padded(x, row.padded_to) for x in tensors]
    if launch not in _refusals:
        _refusals[launch] = _torchs_refusal(passes, key, *tensors[:3])
        if _refusals[launch]:
            return None
    try:
        outputs = run(key, *tensors)
    except RuntimeError as error:  # cuDNN has no plan for it
        if "cudnn" not in str(error).lower():
            raise
        _refusals[launch] = str(error)
        return None
    calls[passes] += 1
    return outputs


def _padded(x, width):
    """With zeros behind each head, up to that width: they add nothing to a score or to an output."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _torchs_refusal(passes, key, q, k, v):
    """Why torch's own choice would not offer cuDNN the tensors, or None."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(passes == "backward") for x in (q, k, v)]
        is_grouped = q.shape[1] != k.shape[1]
        params = SDPAParams(*leaves, None, 0.0, key.is_causal, is_grouped)
        takes = can_use_cudnn_attention(params, False)
    return None if takes else "torch does not give this shape to cuDNN"


def _forward(key, q, k, v):
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, key.is_causal, False, scale=key.scale
    )
    return _as_promised(o, key.q), lse.reshape(key.q.shape[:3])


def _backward(key, q, k, v, do, o, lse):
    # cuDNN's plans are kept by the strides of q, k and v alone: those of o and do must follow.
    strides = _strides_like(q.shape, q.stride())
    o, do = (_laid_out(x.to(q.dtype), strides) for x in (o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), unused, unused, None, None, None,
        q.shape[2], k.shape[2], 0.0, key.is_causal, scale=key.scale,
    )  # fmt: skip
    return tuple(map(_as_promised, grads, (key.q, key.k, key.v)))


def _as_promised(x, view):
    """As wide as the viewed tensor, and as `empty_like` of it lies: what the operators promise."""
    x = x if x.shape[3] == view.shape[3] else x[..., : view.shape[3]]
    return _laid_out(x, _strides_like(view.shape, view.stride))


@functools.lru_cache(maxsize=512)
def _strides_like(shape, strides):
    """Of `empty_like` of such a tensor."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _laid_out(x, strides):
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)
