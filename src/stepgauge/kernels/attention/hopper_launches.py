"""Launches of attention's Gluon kernels: when they are used, and which tiles each program
computes.
"""

import itertools
import math
import os
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import heuristics
from .hopper_dkdv import DKDV_STAGES, dkdv_kernel
from .hopper_dq import BLOCK, DQ_STAGES, dq_kernel
from .hopper_forward import BLOCK_N, NUM_STAGES, forward_kernel
from .hopper_ops import REGISTERS, ROWS, TILE_ROWS
from .launching import PlannedLaunch, permanent_copy

OPT_OUT = "STEPGAUGE_GLUON"
DTYPES = (torch.bfloat16, torch.float16)
# Gluon is experimental, so it is used only with versions of Triton that these kernels compile with.
# They have run with 3.6.
IS_TRITON_SUPPORTED = triton.__version__.startswith(("3.6.", "3.8."))


def takes_forward(key):
    """True if the forward runs in the Gluon kernel."""
    views = (key.q, key.k, key.v, key.o)
    return tile_width(key) in NUM_STAGES and can_run(key, *views) and fills_chip(key, key.q)


def tile_width(key):
    return heuristics.block_width(key.q.shape[3])


def can_run(key, *views):
    """True if the Gluon kernels support the chip, the type and the views, and neither the user nor
    an override turned them off.
    """
    return (
        IS_TRITON_SUPPORTED
        and os.environ.get(OPT_OUT) != "0"
        and key.chip.arch == 90
        and key.dtype in DTYPES
        and key.num_splits is None
        and not key.is_bounded
        and not key.overrides
        and all(view.tma_reads(key.dtype.itemsize) for view in views)
    )


def fills_chip(key, owned):
    """True if there is a tile for each multiprocessor. With fewer, the portable kernels' tiles,
    half as long, keep more of the chip busy.
    """
    return math.prod(owned.shape[:2]) * _tiles_of_head(owned) >= key.chip.num_sms


def forward_launch(key):
    """Returns the launch; its tensors are q, k, v, o and lse."""
    steps = [triton.cdiv(keys, BLOCK_N.value) for keys in _keys_seen(key)]
    return launch_of(
        forward_kernel, key, owned=key.q, schedule=schedule_of(key, key.q, steps, loop_length=key.k.shape[2]),
        boxes=((0, key.q, ROWS), (1, key.k, BLOCK_N), (2, key.v, BLOCK_N), (3, key.o, ROWS)),
        scalars=(key.scale * math.log2(math.e),), constants={"STAGES": NUM_STAGES[tile_width(key)]},
    )  # fmt: skip


def _keys_seen(key):
    """Returns how many keys each tile of queries sees."""
    ends = range(TILE_ROWS.value, (_tiles_of_head(key.q) + 1) * TILE_ROWS.value, TILE_ROWS.value)
    return [min(key.k.shape[2], end) if key.is_causal else key.k.shape[2] for end in ends]


class TileSchedule(NamedTuple):
    """The number of persistent programs (one per multiprocessor), and a tensor from which the
    kernel reads each program's tiles.
    """

    programs: int
    tiles: torch.Tensor


def schedule_of(key, owned, steps, *, loop_length):
    """Returns the schedule of the tiles of `owned`. `steps` has the number of steps in the loop of
    each tile of a head, and `loop_length` is the most rows that a loop covers.
    """
    heads = math.prod(owned.shape[:2])
    programs = min(heads * len(steps), key.chip.num_sms)
    section = key.section(loop_length, num_heads=heads, num_tiles=len(steps))
    return TileSchedule(programs, _schedule(key.device, programs, heads, section, tuple(steps)))


_schedules: dict[tuple, torch.Tensor] = {}  # never cleared, because launches keep the address


def _schedule(*args):
    """Returns the cached schedule; if several threads make it, they all get the same one."""
    return (
        _schedules[args]
        if args in _schedules
        else _schedules.setdefault(args, _make_schedule(*args))
    )


def _make_schedule(device, programs, heads, section, steps):
    """Returns one int32 tensor: the index at which each program's tiles begin, the end of the last
    program's tiles, all tile numbers, and a padding number, because kernels read one tile ahead.
    """
    tiles = heuristics.schedule_tiles(
        steps, num_heads=heads, section=section, num_programs=programs
    )
    begins = itertools.accumulate(map(len, tiles), initial=programs + 1)
    schedule = torch.tensor([*begins, *itertools.chain(*tiles), 0], dtype=torch.int32, device="cpu")
    return schedule if device is None else permanent_copy(device, schedule)


def launch_of(kernel, key, *, owned, boxes, scalars, constants, schedule=None, strides=()):
    """Returns the launch of a kernel whose programs own the tiles of `owned` that a schedule gives
    them, or one tile each without a schedule.

    `boxes` has (position, view, rows of the box). The kernel's numeric arguments are `strides`, the
    counts from the key, and `scalars`.
    """
    batch, num_heads = owned.shape[:2]
    num_tiles = _tiles_of_head(owned)
    return PlannedLaunch(
        kernel,
        (schedule.programs if schedule else batch * num_heads * num_tiles, 1, 1),
        (*([schedule.tiles] if schedule else []), *strides,
         num_heads, key.group, key.q.shape[2], key.k.shape[2], num_tiles, *scalars),
        {"IS_CAUSAL": key.is_causal, **constants},
        boxes=tuple((position, view, [1, 1, rows.value, tile_width(key)]) for position, view, rows in boxes),
        options={"num_warps": 4, "maxnreg": REGISTERS},
        describe=_describe,
    )  # fmt: skip


def _tiles_of_head(view):
    return triton.cdiv(view.shape[2], TILE_ROWS.value)


def _describe(tensor, shape, strides, box):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tensor, shape, strides, box, layout)


def takes_dq(key, dq):
    return _takes(key, key.q, DQ_STAGES, dq)


def takes_dkdv(key, dk, dv):
    return _takes(key, key.k, DKDV_STAGES, dk, dv)


def _takes(key, owned, widths, *outs):
    return (
        tile_width(key) in widths
        and can_run(key, key.q, key.k, key.v, key.do, *outs)
        and fills_chip(key, owned)
    )


def dq_launch(key, dq):
    """Returns the launch; its tensors are q, k, v, do, o, lse, delta and dq."""
    heads = math.prod(key.q.shape[:2])
    section = key.section(
        key.k.shape[2], num_heads=heads, num_tiles=triton.cdiv(key.q.shape[2], TILE_ROWS.value)
    )
    return launch_of(
        dq_kernel, key, owned=key.q, strides=key.o.steps,
        boxes=((0, key.q, ROWS), (1, key.k, BLOCK), (2, key.v, BLOCK), (3, key.do, ROWS), (7, dq, ROWS)),
        scalars=(heads, section, *_scales(key)),
        constants={"STAGES": DQ_STAGES[tile_width(key)], "HEAD_WIDTH": key.q.shape[3]},
    )  # fmt: skip


def dkdv_launch(key, dk, dv):
    """Returns the launch; its tensors are q, k, v, do, lse, delta, dk and dv."""
    steps = [tiles * key.group for tiles in _query_tiles_seen(key)]
    return launch_of(
        dkdv_kernel, key, owned=key.k, schedule=schedule_of(key, key.k, steps, loop_length=key.q.shape[2] * key.group),
        boxes=((0, key.q, BLOCK), (1, key.k, ROWS), (2, key.v, ROWS), (3, key.do, BLOCK), (6, dk, ROWS),
               (7, dv, ROWS)),
        scalars=_scales(key), constants={"STAGES": DKDV_STAGES[tile_width(key)]},
    )  # fmt: skip


def _query_tiles_seen(key):
    """Returns how many tiles of queries see each tile of keys, at least 1, like `_place_keys` in
    the kernel.
    """
    stop = triton.cdiv(key.q.shape[2], BLOCK.value)
    begins = range(0, key.k.shape[2], TILE_ROWS.value)
    return [
        stop - min(begin // BLOCK.value, stop - 1) if key.is_causal else stop for begin in begins
    ]


def _scales(key):
    return key.scale * math.log2(math.e), key.scale
