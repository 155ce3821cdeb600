"""Compares three forms of attention's forward at shapes with few tiles, which do not fill the GPU.

    PYTHONPATH=src python benchmarks/kernels/forward_by_tiles.py OUT [--budget 60]

The forms are Gluon's kernel, the portable kernel, and the portable kernel with keys split into
several parts. The number of tiles from which Gluon's kernel is the fastest is what
`hopper_launches.takes_forward` uses. Needs a Hopper GPU.

All forms are compared with the portable kernel first. Then appends ms of each form per shape to
OUT/forward_by_tiles.jsonl, without host time, and prints one line per shape at the end.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from stepgauge.kernels.attention import hopper_forward, hopper_launches, hopper_ops, launching
from stepgauge.kernels.attention import triton as portable
from stepgauge.measure.environment import environment
from stepgauge.measure.interleaved import time_interleaved

HEADS, LENGTHS, PARTS = (1, 4, 12, 24, 48, 96), (256, 512, 1024, 2048, 4096), (2, 4, 8)


def forwards(q, k, v, is_causal):
    """Returns {form: function that returns (o, lse)}, and "gluon" or "portable": today's choice."""
    scale = q.shape[-1] ** -0.5
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    case = launching.launch_key(q, k, v, is_causal, scale, None, o=o)
    launch = hopper_launches.forward_launch(case)

    def gluon():
        launch(launching.stream_of(q), q, k, v, o, lse)
        return o, lse

    calls = {"gluon": gluon}
    for parts in (1, *PARTS):
        calls[f"portable {parts}"] = lambda n=parts: portable.forward(
            q, k, v, is_causal, scale, num_splits=n
        )
    return calls, "gluon" if portable._plan_forward(
        case
    ).main.kernel is hopper_forward.forward_kernel else "portable"


def check(calls):
    """Raises ValueError unless all forms agree to bfloat16's rounding."""
    results = {name: call()[0].clone().float() for name, call in calls.items()}
    first = results["portable 1"]
    for name, o in results.items():
        error = ((o - first).norm() / first.norm()).item()
        if not error < 1e-2:
            raise ValueError(f"{name} differs from the portable forward by {error:.2e}")


def measure(width, length, heads, is_causal, seconds):
    """Returns {form: median ms} and today's choice."""
    device = torch.device("cuda")
    q, k, v = (
        torch.randn(1, heads, length, width, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    calls, chosen = forwards(q, k, v, is_causal)
    with torch.no_grad():
        check(calls)
        times, failures = time_interleaved(calls, device, seconds=seconds, rounds=3)
    for failure in failures.values():
        raise failure
    return {name: statistics.median(each) for name, each in times.items()}, chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all shapes (60)")
    parser.add_argument("--seconds", type=float, default=0.01, help="timing of each form (0.01)")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("the kernel in Gluon needs a Hopper GPU; there is none here")
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    common = {"environment": environment(torch.device("cuda"))}
    shapes = list(itertools.product((64, 128), LENGTHS, HEADS, (True, False)))
    random.Random(0).shuffle(shapes)  # so that a short run covers all sizes
    lines = []
    for width, length, heads, is_causal in shapes:
        if time.monotonic() > end:
            break
        row: dict[str, Any] = {
            "kind": "forward_by_tiles",
            "width": width,
            "sequence": length,
            "heads": heads,
            "causal": is_causal,
        }
        row["tiles"] = heads * math.ceil(length / hopper_ops.TILE_ROWS.value)
        try:
            row["ms"], row["chosen"] = measure(width, length, heads, is_causal, args.seconds)
        except Exception as problem:  # continue with the other shapes
            row["failed"] = f"{type(problem).__name__}: {problem!s:.200}"
        with (args.out / "forward_by_tiles.jsonl").open("a") as file:
            print(json.dumps(row | common), file=file)
        lines.append(row)
    for row in sorted(
        lines, key=lambda row: (row["width"], row["tiles"], row["sequence"], row["causal"])
    ):
        result = row.get("failed") or ", ".join(
            f"{name} {ms * 1e3:.1f}" for name, ms in row["ms"].items()
        )
        mask = "causal" if row["causal"] else "full"
        print(f"D {row['width']} {row['tiles']} tiles ({row['heads']} x {row['sequence']} {mask}), us: {result}"
              f"; chosen {row.get('chosen')}")  # fmt: skip


if __name__ == "__main__":
    main()
