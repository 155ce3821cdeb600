"""Finds the fastest launch shape of a kernel. Each candidate is checked against the oracle and timed.

    PYTHONPATH=src python benchmarks/kernels/sweep.py OUT_DIR adamw [--budget SECONDS] [--field
    NAME=VALUE]

The operation is rms-norm, attention, attention-fp32, linear-cross-entropy or adamw. Appends a JSON
line per candidate to OUT_DIR/sweep.jsonl as soon as it is timed. At the end prints the best
candidates of each problem shape with their rate relative to today's choice ("as it is"). All
problem shapes get an equal part of the budget; candidates run in a shuffled order, so that a short
run covers the whole list. For small shapes add --field rows=64.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from stepgauge.bench.kernels import OPERATIONS
from stepgauge.bench.kernels.operation import DTYPES
from stepgauge.kernels.adamw import triton as adamw
from stepgauge.kernels.attention import heuristics
from stepgauge.kernels.attention.heuristics import Tiles
from stepgauge.kernels.linear_cross_entropy import triton as linear_cross_entropy
from stepgauge.kernels.rms_norm import ops
from stepgauge.kernels.rms_norm import triton as rms_norm
from stepgauge.measure.accuracy import tolerance
from stepgauge.measure.environment import environment
from stepgauge.measure.interleaved import time_interleaved
from stepgauge.report.names import describe
from stepgauge.spec.record import Record

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Sweep(NamedTuple):
    """The candidates of an operation.

    points         fields of each spec to measure
    candidates     for a spec, pairs (name, context in which calls use the candidate)
    largest_error  limit of the relative error, where the benchmark's own limit is too loose: it allows
                   for any sum in the dtype
    """

    operation: str
    points: list[dict[str, Any]]
    candidates: Callable[[Any], Iterable[tuple[str, Context]]]
    largest_error: float = math.inf


def rms_norm_shapes(spec):
    name, make = {
        "forward": ("forward_config", forward_shapes),
        "backward": ("backward_config", backward_shapes),
    }[spec.passes]

    @contextlib.contextmanager
    def using(config):
        with (
            mock.patch.object(rms_norm, name, lambda width, itemsize: config),
            mock.patch.dict(ops._PLANS, clear=True),
        ):
            yield

    for config in make(spec.width, DTYPES[spec.dtype].itemsize):
        yield str(config), lambda config=config: using(config)


def forward_shapes(width, itemsize):
    block = triton.next_power_of_2(width)
    for rows, warps in itertools.product((1, 2, 4, 8), (2, 4, 8, 16, 32)):
        if 4 <= rows * block // (warps * 32) <= 64:
            yield rms_norm.ForwardConfig(block, rows, warps)
    if width >= 16384:
        for inner, warps in ((4096, 8), (8192, 16), (16384, 16), (16384, 32)):
            yield rms_norm.ForwardConfig(inner, 1, warps, wide=True)


def backward_shapes(width, itemsize):
    block = triton.next_power_of_2(width)
    for rows, warps, stages, per_sm in itertools.product(
        (1, 2, 4), (4, 8, 16, 32), (1, 2, 3, 4), (1, 2, 3)
    ):
        elements = rows * block // (warps * 32)  # per thread and tensor
        if not 4 <= elements <= 32 or warps * per_sm > 32 or (rows > 1 and block > 2048):
            continue
        keep = elements < 32
        # nothing hides the latency of loads: no copies in flight and few warps
        idle = stages == 1 and warps * per_sm < 16
        if not idle and (3 - keep) * rows * block * itemsize * (stages - 1) * per_sm <= 220 * 1024:
            yield rms_norm.BackwardConfig(block, rows, warps, stages, per_sm, keep_weight=keep)
    if width >= 16384:
        for inner, warps, blocks, per_sm in (
            (4096, 16, 4, 1),
            (4096, 8, 2, 1),
            (2048, 8, 4, 2),
            (8192, 16, 1, 1),
        ):
            yield rms_norm.BackwardConfig(inner, 1, warps, 1, per_sm, blocks=blocks)


# (query rows, key rows, warps, stages[, order]) of one kernel. The other kernels keep their tiles.
ATTENTION_TILES: dict[str, list[tuple[Any, ...]]] = {
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (64, 32, 4, 4), (64, 128, 4, 3)],
    "dq": [(64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (64, 32, 4, 4)],
    "dkdv": [(128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, "early"), (64, 64, 4, 3, "early"),
             (32, 64, 4, 3, "early"), (64, 128, 8, 2), (128, 128, 8, 2)],
}  # fmt: skip


def attention_tiles(spec):
    for kernel in ("forward",) if spec.passes == "forward" else ("dkdv", "dq"):
        for block_q, block_k, warps, stages, *order in ATTENTION_TILES[kernel]:
            tiles = Tiles(block_q, block_k, warps, stages, use_tma=True, order=(*order, "late")[0])
            yield (
                f"{kernel} {tiles}",
                lambda kernel=kernel, tiles=tiles: heuristics.override_tiles(**{kernel: tiles}),
            )


# float32, by kernel and width: (query rows, key rows, warps, stages, products, programs per
# multiprocessor[, order]). Of 264 tiles that were compiled ahead of time, these are large ones with no or
# few register spills. At width 128 every dkdv spills, because it keeps the bf16 parts of k and v in
# registers: these spill least (184 to 552 bytes of stack).
FP32_TILES: dict[Any, list[tuple[Any, ...]]] = {
    ("forward", 128): [
        (128, 32, 8, 1, "bf16x6", 1), (128, 32, 8, 2, "bf16x6", 1), (128, 64, 8, 1, "bf16x6", 1),
        (64, 32, 4, 1, "bf16x6", 2), (64, 64, 4, 1, "bf16x6", 2), (128, 16, 8, 1, "bf16x6", 1),
        (128, 32, 8, 1, "tf32x3", 1), (64, 32, 4, 1, "tf32x3", 2),
    ],
    ("forward", 64): [
        (128, 64, 8, 1, "bf16x6", 1), (128, 64, 8, 2, "bf16x6", 1), (64, 64, 4, 2, "bf16x6", 2),
        (64, 32, 4, 2, "bf16x6", 2), (64, 64, 8, 2, "bf16x6", 1), (128, 32, 8, 1, "bf16x6", 1),
        (128, 64, 8, 2, "tf32x3", 1), (64, 32, 4, 2, "tf32x3", 2),
    ],
    ("dq", 128): [
        (128, 32, 8, 1, "bf16x6", 1), (64, 16, 4, 1, "bf16x6", 2), (64, 32, 8, 1, "bf16x6", 1),
        (128, 16, 8, 1, "bf16x6", 1), (64, 32, 4, 1, "bf16x6", 1), (64, 16, 8, 1, "bf16x6", 1),
        (64, 32, 8, 1, "tf32x3", 1), (32, 32, 4, 1, "bf16x6", 2),
    ],
    ("dq", 64): [
        (128, 64, 8, 1, "bf16x6", 1), (128, 32, 8, 2, "bf16x6", 1), (128, 32, 8, 1, "bf16x6", 1),
        (64, 32, 4, 2, "bf16x6", 2), (64, 64, 4, 1, "bf16x6", 2), (128, 64, 8, 1, "tf32x3", 1),
        (64, 64, 8, 1, "tf32x3", 1), (64, 64, 4, 1, "tf32x3", 2),
    ],
    ("dkdv", 128): [
        (16, 128, 8, 1, "bf16x6", 1), (16, 64, 4, 1, "bf16x6", 2), (16, 32, 4, 2, "bf16x6", 2),
        (32, 32, 4, 2, "bf16x6", 2), (16, 64, 8, 1, "bf16x6", 1, "folded"), (32, 64, 8, 1, "bf16x6", 1, "folded"),
        (32, 64, 8, 1, "tf32x3", 1), (16, 32, 4, 1, "tf32x3", 2),
    ],
    ("dkdv", 64): [
        (32, 128, 8, 1, "bf16x6", 1), (32, 128, 8, 2, "bf16x6", 1), (32, 64, 4, 1, "bf16x6", 2),
        (32, 64, 4, 2, "bf16x6", 2), (16, 64, 4, 2, "bf16x6", 2), (64, 128, 8, 1, "bf16x6", 1),
        (32, 128, 8, 1, "tf32x3", 1), (32, 64, 4, 1, "tf32x3", 2),
    ],
}  # fmt: skip


# The same for kernels whose operands are split into bf16 parts before the launch: (query rows, key rows,
# warps, stages, programs per multiprocessor).
BF16X3_TILES = {
    ("dq_bf16x3", 128): [(64, 32, 4, 2, 1), (64, 16, 4, 2, 1), (64, 32, 4, 1, 1)],
    ("dkdv_bf16x3", 128): [(32, 64, 4, 2, 1), (16, 64, 4, 2, 1), (32, 64, 4, 1, 1)],
    ("dq_bf16x3", 64): [
        (128, 64, 8, 2, 1),
        (64, 64, 4, 2, 1),
        (64, 64, 4, 1, 2),
        (64, 32, 4, 2, 2),
    ],
    ("dkdv_bf16x3", 64): [
        (32, 64, 4, 2, 2),
        (64, 128, 8, 2, 1),
        (64, 64, 4, 1, 2),
        (32, 128, 8, 2, 1),
    ],
}


def bf16x3_tiles(spec):
    for kernel in ("dq_bf16x3", "dkdv_bf16x3"):
        for block_q, block_k, warps, stages, per_sm in BF16X3_TILES[kernel, spec.width]:
            tiles = Tiles(block_q, block_k, warps, stages, True, per_sm)
            yield (
                f"{kernel} {tiles}",
                lambda kernel=kernel, tiles=tiles: heuristics.override_tiles(**{kernel: tiles}),
            )


def attention_fp32_tiles(spec):
    if spec.passes == "backward":
        yield from bf16x3_tiles(spec)
    for kernel in ("forward",) if spec.passes == "forward" else ("dkdv", "dq"):
        for block_q, block_k, warps, stages, products, per_sm, *order in FP32_TILES[
            kernel, spec.width
        ]:
            tiles = Tiles(
                block_q, block_k, warps, stages, False, per_sm, 0.0, products, (*order, "late")[0]
            )
            yield (
                f"{kernel} {tiles}",
                lambda kernel=kernel, tiles=tiles: heuristics.override_tiles(**{kernel: tiles}),
            )


def row_launches(spec):
    walk = {"VEC": 8, "STAGES": 1, "REVERSE": True, "KEEP": "evict_last"}
    launches = [
        {"BLOCK_V": block, **walk, "num_warps": warps}
        for block, warps in ((2048, 8), (4096, 16), (8192, 32))
    ]
    for launch in launches:
        context = mock.patch.object(
            linear_cross_entropy, "row_launch", lambda *args, _launch=launch, **options: _launch
        )
        yield str(launch), lambda context=context: context


def adamw_shapes(spec):
    itemsize = DTYPES[spec.dtype].itemsize
    blocks = ((2048, 8), (2048, 4), (4096, 8), (1024, 4), (1024, 8))
    for chunk, (block, warps) in itertools.product((1024, 2048, 4096, 8192, 16384), blocks):
        if block <= chunk:
            shape = adamw.SHAPES[itemsize]._replace(chunk=chunk, block=block, num_warps=warps)
            yield str(shape), lambda shape=shape: mock.patch.dict(adamw.SHAPES, {itemsize: shape})


SWEEPS = {
    "rms-norm": Sweep(
        "rms-norm",
        [
            {"rows": rows, "width": width, "dtype": dtype, "passes": passes}
            for rows, width in (
                (16_384, 16_384),
                (50_000, 8192),
                (50_000, 4096),
                (50_000, 2048),
                (50_000, 1024),
            )
            for dtype in ("fp32", "bf16")
            for passes in ("backward", "forward")
        ],
        rms_norm_shapes,
    ),
    "attention": Sweep(
        "attention",
        [
            {
                "batch": 2,
                "heads": 2048 // width,
                "sequence": 8192,
                "width": width,
                "passes": passes,
                "dtype": "bf16",
            }
            for width in (64, 128, 32)
            for passes in ("backward", "forward")
        ],
        attention_tiles,
    ),
    "attention-fp32": Sweep(
        "attention",
        [
            {
                "batch": 8,
                "heads": 1,
                "sequence": 4096,
                "width": width,
                "causal": causal,
                "passes": each,
                "dtype": "fp32",
            }
            for each in ("forward", "backward")
            for width in (128, 64)
            for causal in (False, True)
        ],
        attention_fp32_tiles,
        largest_error=5e-6,  # three products of bf16 halves have an error of 8e-6, too large for float32
    ),
    "linear-cross-entropy": Sweep(
        "linear-cross-entropy",
        [
            {"tokens": tokens, "width": width, "vocabulary": vocabulary}
            for tokens, width, vocabulary in (
                (4096, 4096, 128_256),
                (2048, 2560, 10_000),
                (4096, 2048, 50_257),
            )
        ],
        row_launches,
    ),
    "adamw": Sweep(
        "adamw",
        [{"layers": 24, "width": 1280, "dtype": dtype} for dtype in ("bf16", "fp32")],
        adamw_shapes,
    ),
}


def sweep(spec, chosen, *, end, record):
    """Returns {candidate: ms} of all correct candidates and of today's choice, "as it is"."""
    operation = OPERATIONS[spec.kind]
    function = operation.implementations["ours"].make(spec)
    case, device = operation.case(spec), torch.device(spec.device)
    limit = min(chosen.largest_error, tolerance(DTYPES[spec.dtype], operation.reduction(spec)))
    shuffled = sorted(
        chosen.candidates(spec), key=lambda candidate: zlib.crc32(candidate[0].encode())
    )
    found = {}
    for name, using in [("as it is", contextlib.nullcontext), *shuffled]:
        if found and time.monotonic() > end:
            break
        try:
            with using():
                error = case.error(function)
                if not error <= limit:
                    raise ValueError(f"wrong by {error:.2e}, allowed {limit:.2e}")
                times, failures = time_interleaved(
                    {name: case.call(function, spec.passes)}, device, seconds=spec.seconds, rounds=1
                )
            for failure in failures.values():
                raise failure
            found[name] = statistics.median(times[name])
            record(spec, candidate=name, ms=found[name], relative_error=error)
        except (
            Exception
        ) as problem:  # a candidate that does not compile or is wrong is recorded as failed
            record(spec, candidate=name, failed=f"{type(problem).__name__}: {problem!s:.200}")
    return found


def name_of(spec):
    return describe(Record(kind=spec.kind, spec=dataclasses.asdict(spec), metrics={}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("operation", choices=SWEEPS)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for all shapes (120)")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="timing of each candidate (0.05)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set this field of every shape",
    )
    args = parser.parse_args()
    fields = {
        name: int(value) if value.isdecimal() else value
        for name, _, value in (each.partition("=") for each in args.field)
    }
    chosen = SWEEPS[args.operation]
    make = OPERATIONS[chosen.operation].spec
    specs = [
        make(**{**point, **fields}, seconds=args.seconds, device=args.device)
        for point in chosen.points
    ]
    specs = list(dict.fromkeys(specs))  # --field may have made some specs equal
    args.out_dir.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    common = {"environment": environment(torch.device(args.device))}

    def record(spec, **row):
        with (args.out_dir / "sweep.jsonl").open("a") as file:
            print(
                json.dumps({"kind": spec.kind, "spec": dataclasses.asdict(spec), **row, **common}),
                file=file,
            )
        outcome = f"{row['ms']:.4f} ms" if "ms" in row else row["failed"]
        print(f"{time.monotonic() - start:6.1f} s  {outcome}  {row['candidate']}", flush=True)

    best = {}
    for number, spec in enumerate(specs, 1):
        print(f"-- {number}/{len(specs)} {name_of(spec)}", flush=True)
        end = start + args.budget * number / len(specs)
        best[number] = sweep(spec, chosen, end=end, record=record)
    for number, found in best.items():
        print(f"\n{name_of(specs[number - 1])}: {len(found)} tried")
        for name, ms in sorted(found.items(), key=lambda each: each[1])[:4]:
            print(
                f"  {ms:.4f} ms, {found.get('as it is', float('nan')) / ms:.3f} of today's rate, {name}"
            )


if __name__ == "__main__":
    main()
