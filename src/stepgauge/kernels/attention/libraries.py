"""Runs attention in a library for the shapes where one was measured faster than the kernels here.

TABLE lists the passes and shapes of each library; the first matching row whose library is available
runs. A library replaces a kernel launch, below autograd. Differentiation, compilation, autocast and
argument checks are therefore the same for every library, and the log-sum-exp (natural, fp32) of one
library's forward serves another's backward.

The libraries sum dq in no fixed order, so none is used under
`torch.use_deterministic_algorithms(True)`. An environment variable turns each of them off.

docs/log/2026-11-23-attention.md has the measurements and the reasons.
"""

import collections
from typing import NamedTuple

import torch

from . import by_torch, cudnn, flash_attention_4

ARCH, DTYPES = 90, (torch.bfloat16, torch.float16)
# By the name used in TABLE. Each module has TITLE, is_allowed() and
#   refusal(passes, key, cu_seqlens, *tensors): why it cannot run the launch, or None;
#   forward(key, cu_seqlens, q, k, v), backward(key, cu_seqlens, q, k, v, do, o, lse): the results, or
#   None if only the attempt shows that the launch is not supported;
#   backward_bytes(q, k).
LIBRARIES = {"fa4": flash_attention_4, "cudnn": cudnn}
TITLES = {name: module.TITLE for name, module in {**LIBRARIES, "torch": by_torch}.items()}


class Measured(NamedTuple):
    """Milliseconds of one causal bf16 pass, ours and the library's in the same process.

    `shape` is (batch, heads, length).
    """

    gpu: str
    shape: tuple[int, int, int]
    ours_ms: float
    library_ms: float


class Row(NamedTuple):
    """A pass ("forward" or "backward") that a library runs, for head widths `min_width` to
    `max_width`, at least `min_length` queries and keys, and at least `min_queries` queries over all
    heads and sequences.

    `seen` says what limits the keys of a query in addition to the causal mask: "all" (nothing), a
    "window", or "packed" sequences (with or without a window). No row of TABLE has a window or
    packed sequences, because no library was faster there; tests and benchmarks use such rows.
    """

    library: str
    passes: str
    min_width: int
    max_width: int
    min_length: int
    min_queries: int
    measured: tuple[Measured, ...]
    seen: str = "all"


# Everything else is faster here or was not measured. FlashAttention-4 costs the host about 0.4 ms
# per pass (20 heads of 3001 x 96 take 0.36 ms here and 0.77 ms there, of which the GPU works 0.31
# ms), so its rows have passes of 0.5 ms or more, or a backward of 1 ms that hides the host. With
# few heads, the kernels here split the loop over the chip: they are faster at one head of 16,384
# (0.225 ms, cuDNN 0.393 ms) but not at one of 32,768. Records in benchmarks/results: for
# FlashAttention-4 2026-11-23-h100-attention-libraries and -second and, from 131,072 queries on,
# 2026-11-29-h200-attention-of-ranks; for cuDNN 2026-11-22-h200-handed-over and
# 2026-11-21-h200-kernels-second.
TABLE = (
    Row("fa4", "forward", 64, 64, 8192, 262_144, (Measured("H100", (1, 16, 16384), 1.207, 0.998),)),
    Row("fa4", "forward", 64, 64, 16384, 131_072, (Measured("H200", (1, 8, 16384), 0.594, 0.503),)),
    Row("fa4", "forward", 256, 256, 4096, 65_536, (Measured("H100", (2, 8, 4096), 0.404, 0.207),)),
    Row("fa4", "forward", 128, 128, 32768, 1 << 20, (Measured("H100", (1, 32, 32768), 13.61, 12.68),)),
    Row(
        "fa4", "backward", 64, 64, 2048, 262_144,
        (
            Measured("H100", (1, 16, 16384), 3.64, 2.51),
            Measured("H100", (8, 25, 2048), 0.870, 0.670),
        ),
    ),
    Row("fa4", "backward", 64, 64, 16384, 131_072, (Measured("H200", (1, 8, 16384), 1.820, 1.235),)),
    Row(
        "fa4", "backward", 128, 128, 8192, 131_072,
        (
            Measured("H100", (1, 16, 16384), 5.42, 4.36),
            Measured("H100", (2, 16, 8192), 2.87, 2.49),  # fp16
            Measured("H100", (2, 32, 8192), 5.80, 4.89),  # 8 key heads
            Measured("H200", (1, 16, 8192), 1.436, 1.249),
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
    """Returns the names of the libraries that are available and not turned off."""
    if torch.are_deterministic_algorithms_enabled():
        return ()
    return tuple(name for name, library in LIBRARIES.items() if library.is_allowed())


def rows_of(passes, key):
    """Returns the rows of TABLE that match the launch, in the order to try them."""
    if key.chip.arch != ARCH or key.overrides or key.num_splits or not key.libraries:
        return []
    shapes = key.q.shape, key.k.shape[2]
    return _matching_rows(
        passes, key.dtype, *shapes, key.is_causal, key.window, key.is_packed, key.libraries
    )


def _matching_rows(passes, dtype, shape, num_keys, is_causal, window, is_packed, names):
    batch, heads, length, width = shape
    # if lengths differ, the libraries align the causal mask to another corner
    if dtype not in DTYPES or (is_causal and num_keys != length):
        return []
    seen = "packed" if is_packed else "window" if window else "all"
    return [
        row
        for row in TABLE
        if row.library in names
        and (row.passes, row.seen) == (passes, seen)
        and row.min_width <= width <= row.max_width
        and min(length, num_keys) >= row.min_length
        and batch * heads * length >= row.min_queries
    ]


def backward_bytes(arguments):
    """Returns the temporary bytes of the library that would run this backward on Hopper, 0 if none
    would. `arguments` are those of the operator.
    """
    _, q, k, _, _, _, is_causal, _, *bounds = arguments
    window, cu_seqlens = [*bounds, *(0, None)[len(bounds) :]]  # fills in the operator's defaults
    rows = _matching_rows(
        "backward",
        q.dtype,
        q.shape,
        k.shape[2],
        is_causal,
        window,
        cu_seqlens is not None,
        allowed(),
    )
    return LIBRARIES[rows[0].library].backward_bytes(q, k) if rows else 0


calls: collections.Counter[tuple[str, str]] = collections.Counter()  # by pass and library
# By (library, pass, key): why the library does not run it, or None if it does.
_refusals: dict[tuple, str | None] = {}
_MAX_REFUSALS = 4096  # then the dictionary is cleared


def titles_by_pass():
    """Returns the titles of the libraries that ran each pass since `calls` was cleared."""
    passes = sorted({passes for passes, _ in calls}, reverse=True)
    titles = {each: [TITLES[name] for ran, name in calls if ran == each] for each in passes}
    return {each: " and ".join(of_pass) for each, of_pass in titles.items()}


def forward(key, q, k, v, cu_seqlens=None):
    """Returns (o, log-sum-exp) from a library, or None if none runs this launch."""
    return _run_in_library("forward", key, cu_seqlens, q, k, v)


def backward(key, do, q, k, v, o, lse, cu_seqlens=None):
    """Returns (dq, dk, dv) from a library, or None if none runs this launch."""
    return _run_in_library("backward", key, cu_seqlens, q, k, v, do, o, lse)


def _run_in_library(passes, key, *args):
    for row in rows_of(passes, key):
        library, launch = LIBRARIES[row.library], (row.library, passes, key)
        if launch not in _refusals:
            if len(_refusals) >= _MAX_REFUSALS:
                _refusals.clear()
            _refusals[launch] = library.refusal(passes, key, *args)
        if _refusals[launch]:
            continue
        outputs = getattr(library, passes)(key, *args)
        if outputs is not None:
            calls[passes, row.library] += 1
            return outputs
        _refusals[launch] = "the library has no plan for this shape"
    return None
