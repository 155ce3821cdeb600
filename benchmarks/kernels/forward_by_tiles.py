"""Attention's forward where it fills little of the chip: in Gluon, portable in one part, and
portable in several.

    PYTHONPATH=src python benchmarks/kernels/forward_by_tiles.py OUT [--budget 60]

From which number of tiles on Gluon's is the fastest decides `hopper_launches.takes_forward`. Rows of
OUT/forward_by_tiles.jsonl: ms of each, the kernels alone, after each was held against the first; at
the end one line a shape. The chip is `cuda`'s.
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
    """{name: a call that gives (o, lse)}; what the plan would choose is among them."""
    scale = q.shape[-1] ** -0.5
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    case = launching.launch_key(q, k, v, is_causal, scale, None, o=o)
    launch = hopper_launches.forward_launch(case)

    def in_gluon():
        launch(launching.stream_of(q), q, k, v, o, lse)
        return o, lse

    calls = {"gluon": in_gluon}
    for parts in (1, *PARTS):
        calls[f"portable {parts}"] = lambda n=parts: portable.forward(
            q, k, v, is_causal, scale, num_splits=n
        )
    return calls, "gluon" if portable._plan_forward(
        case
    ).main.kernel is hopper_forward.forward_kernel else "portable"


def check(calls):
    """ValueError unless all give the same to bfloat16's rounding."""
    results = {name: call()[0].clone().float() for name, call in calls.items()}
    first = results["portable 1"]
    for name, o in results.items():
        error = ((o - first).norm() / first.norm()).item()
        if not error < 1e-2:
            raise ValueError(f"{name} differs from the portable forward by {error:.2e}")


def measure(width, length, heads, is_causal, seconds):
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
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all (60)")
    parser.add_argument("--seconds", type=float, default=0.01, help="of timing for each (0.01)")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("the kernel in Gluon is written for Hopper, and there is no such GPU here")
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.budget
    common = {"environment": environment(torch.device("cuda"))}
    shapes = list(itertools.product((64, 128), LENGTHS, HEADS, (True, False)))
    random.Random(0).shuffle(shapes)  # what the time allows is spread over all
    lines = []
    for width, length, heads, is_causal in shapes:
        if time.monotonic() > until:
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
        except Exception as problem:  # one shape less
            row["failed"] = f"{type(problem).__name__}: {problem!s:.200}"
        with (args.out / "forward_by_tiles.jsonl").open("a") as file:
            print(json.dumps(row | common), file=file)
        lines.append(row)
    for row in sorted(
        lines, key=lambda row: (row["width"], row["tiles"], row["sequence"], row["causal"])
    ):
        told = row.get("failed") or ", ".join(
            f"{name} {ms * 1e3:.1f}" for name, ms in row["ms"].items()
        )
        mask = "causal" if row["causal"] else "full"
        print(f"D {row['width']} {row['tiles']} tiles ({row['heads']} x {row['sequence']} {mask}), us: {told}"
              f"; chosen {row.get('chosen')}")  # fmt: skip


if __name__ == "__main__":
    main()
