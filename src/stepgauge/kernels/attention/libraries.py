"""Attention by a library, for the shapes where one was measured faster than the kernels here.

The table says which pass of which shapes, and by whom; of those that the process has, the first row
that fits runs. A library's call stands in the place of a launch, below autograd: what is
differentiated, compiled, cast and refused does not depend on who computes, and a forward of one
hands its log-sum-exp (natural, fp32) to the backward of another.

Libraries add dq up in any order: `torch.use_deterministic_algorithms(True)` leaves every shape to the
kernels here. Each has an environment variable that leaves it out.

docs/log/2026-11-23-attention.md has the figures and what was weighed.
"""

import collections
from typing import NamedTuple

import torch

from . import by_torch, cudnn, flash_attention_4

ARCH, DTYPES = 90, (torch.bfloat16, torch.float16)
# By the name that rows use. A library has TITLE, is_allowed(), refusal(passes, key, *tensors): why
# it does not take a launch, asked once a launch; forward(key, cu_seqlens, q, k, v) and backward(key,
# cu_seqlens, q, k, v, do, o, lse), None where it finds out later that it does not; backward_bytes(q, k).
LIBRARIES = {"fa4": flash_attention_4, "cudnn": cudnn}
TITLES = {name: module.TITLE for name, module in {**LIBRARIES, "torch": by_torch}.items()}


class Measured(NamedTuple):
    """Milliseconds of one pass of batch x heads x length, bf16, causal, in one process."""

    gpu: str
    shape: tuple[int, int, int]
    ours_ms: float
    library_ms: float


class Row(NamedTuple):
    """A pass that a library runs: of heads `narrowest` to `widest`, of at least `least_length`
    queries and keys, and `least_queries` in all heads and sequences. `seen` is what a query sees
    beside the causal mask: "all" keys, those of a "window", or those of its "packed" sequence (with
    a window or without). No row of TABLE has a window or packed sequences, which no library was
    faster at; tests and benchmarks have such rows.
    """

    library: str
    passes: str
    narrowest: int
    widest: int
    least_length: int
    least_queries: int
    measured: tuple[Measured, ...]
    seen: str = "all"


# Everything else is faster here or was not measured. FlashAttention-4's rows are of 0.5 ms and more,
# for a pass of it takes the host about 0.4 ms (20 heads of 3001 x 96: 0.36 ms here, 0.77 by it, of
# which the GPU works 0.31), but where a backward of 1 ms hides it. With few heads a loop of ours is
# split over the chip: one head of 16,384 is faster here (0.225 ms, cuDNN 0.393), one of 32,768 is
# not. Records in benchmarks/results: 2026-11-23-h100-attention-libraries and -second of
# FlashAttention-4, 2026-11-22-h200-handed-over and 2026-11-21-h200-kernels-second of cuDNN.
TABLE = (
    Row("fa4", "forward", 64, 64, 8192, 262_144, (Measured("H100", (1, 16, 16384), 1.207, 0.998),)),
    Row("fa4", "forward", 256, 256, 4096, 65_536, (Measured("H100", (2, 8, 4096), 0.404, 0.207),)),
    Row("fa4", "forward", 128, 128, 32768, 1 << 20, (Measured("H100", (1, 32, 32768), 13.61, 12.68),)),
    Row(
        "fa4", "backward", 64, 64, 2048, 262_144,
        (
            Measured("H100", (1, 16, 16384), 3.64, 2.51),
            Measured("H100", (8, 25, 2048), 0.870, 0.670),
        ),
    ),
    Row(
        "fa4", "backward", 128, 128, 8192, 262_144,
        (
            Measured("H100", (1, 16, 16384), 5.42, 4.36),
            Measured("H100", (2, 16, 8192), 2.87, 2.49),  # fp16
            Measured("H100", (2, 32, 8192), 5.80, 4.89),  # 8 key heads
        ),
    ),
    Row(
        "fa4", "backward", 128, 128, 2048, 1_048_576,
        (Measured("H200", (16, 32, 2048), 3.250, 3.185),),  # 8 key heads
    ),
    Row("cudnn", "forward", 129, 256, 512, 16384, (Measured("H200", (2, 8, 4096), 0.410, 0.268),)),
    Row("cudnn", "backward", 129, 256, 512, 16384, (Measured("H200", (2, 8, 4096), 2.76, 1.02),)),
    Row(
        "cudnn", "backward", 128, 128, 8192, 32768,
        (
            Measured("H200", (2, 16, 8192), 2.89, 2.73),
            Measured("H200", (1, 16, 16384), 5.75, 5.17),
            Measured("H200", (1, 1, 32768), 1.34, 1.18),
        ),
    ),
    Row(
        "cudnn", "backward", 64, 64, 4096, 32768,
        (
            Measured("H200", (2, 32, 8192), 3.70, 3.29),
            Measured("H200", (1, 16, 16384), 3.67, 3.23),
            Measured("H200", (1, 1, 32768), 0.867, 0.796),
        ),
    ),
)  # fmt: skip


def allowed():
    """The names of the libraries that the process has and lets take what the table gives them."""
    if torch.are_deterministic_algorithms_enabled():
        return ()
    return tuple(name for name, library in LIBRARIES.items() if library.is_allowed())


def rows_of(passes, key):
    """The table's rows for the launch, the fastest first."""
    if key.chip.arch != ARCH or key.overrides or key.num_splits or not key.libraries:
        return []
    seen = _seen(key.window, key.is_packed)
    rows = rows_for(passes, key.dtype, key.q.shape, key.k.shape[2], key.is_causal, seen)
    return [row for row in rows if row.library in key.libraries]


def _seen(window, is_packed):
    return "packed" if is_packed else "window" if window else "all"


def rows_for(passes, dtype, shape, num_keys, is_causal, seen="all"):
    """The table's rows for queries of that shape."""
    batch, heads, length, width = shape
    # where lengths differ, causal masks have two corners to start from
    if dtype not in DTYPES or (is_causal and num_keys != length):
        return []
    return [
        row
        for row in TABLE
        if (row.passes, row.seen) == (passes, seen)
        and row.narrowest <= width <= row.widest
        and min(length, num_keys) >= row.least_length
        and batch * heads * length >= row.least_queries
    ]


def backward_bytes(arguments):
    """What the library that runs the backward takes beside its results, of the operator's arguments
    on Hopper.
    """
    _, q, k, _, _, _, is_causal, *_ = arguments
    window, cu_seqlens = [*arguments[8:], *(0, None)[len(arguments) - 8 :]]
    seen, present = _seen(window, cu_seqlens is not None), allowed()
    rows = rows_for("backward", q.dtype, q.shape, k.shape[2], is_causal, seen)
    taken = [LIBRARIES[row.library] for row in rows if row.library in present]
    return taken[0].backward_bytes(q, k) if taken else 0


calls: collections.Counter[tuple[str, str]] = collections.Counter()  # by pass and library
_refusals: dict[tuple, str | None] = {}  # by launch, why it is not taken; None: it is
_MOST_KEPT = 4096  # launches; then it is asked again


def titles_by_pass():
    """Of each pass that libraries ran since `calls` was cleared, their titles."""
    passes = sorted({passes for passes, _ in calls}, reverse=True)
    titles = {each: [TITLES[name] for ran, name in calls if ran == each] for each in passes}
    return {each: " and ".join(of_pass) for each, of_pass in titles.items()}


def forward(key, q, k, v, cu_seqlens=None):
    """(o, log-sum-exp) by a library, or None where the kernels here run."""
    return _tried("forward", key, cu_seqlens, q, k, v)


def backward(key, do, q, k, v, o, lse, cu_seqlens=None):
    """(dq, dk, dv) by a library, or None where the kernels here run."""
    return _tried("backward", key, cu_seqlens, q, k, v, do, o, lse)


def _tried(passes, key, *given):
    for row in rows_of(passes, key):
        library, launch = LIBRARIES[row.library], (row.library, passes, key)
        if launch not in _refusals:
            if len(_refusals) >= _MOST_KEPT:
                _refusals.clear()
            _refusals[launch] = library.refusal(passes, key, *given)
        if _refusals[launch]:
            continue
        outputs = getattr(library, passes)(key, *given)
        if outputs is not None:
            calls[passes, row.library] += 1
            return outputs
        _refusals[launch] = "it has no plan for it"
    return None
