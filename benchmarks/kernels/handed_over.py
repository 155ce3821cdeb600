"""What is handed to a library, beside our kernels and the peers, on one Hopper GPU in 90 seconds:

    PYTHONPATH=src python benchmarks/kernels/handed_over.py OUT [--budget 90] [--trial]

Attention where cuDNN takes a pass (kernels/attention/cudnn.py) and just outside of it, and linear +
cross-entropy of small sizes. Each row is measured as it is run by default ("default") and with our
kernels forced ("kernels"), checked against float64, the peers beside each. Everything is launched from
Python. Appends to OUT/handed_over.jsonl, a record a line with its `forced`; rows that the budget does not
hold are named, with status 1. --trial takes tiny shapes on the CPU.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from stepgauge.bench.kernels import comparison
from stepgauge.bench.launchers import start_counting, with_launchers
from stepgauge.kernels.attention import cudnn
from stepgauge.kernels.linear_cross_entropy import by_torch
from stepgauge.spec.kernel import AttentionSpec, KernelSpec, LinearCrossEntropySpec

FORCED = ("default", "kernels")


def attention(
    batch: int, heads: int, sequence: int, width: int, causal: bool = True
) -> list[KernelSpec]:
    shape = {"batch": batch, "heads": heads, "sequence": sequence, "width": width, "causal": causal}
    return [
        AttentionSpec(**shape, passes=passes, peers="fa2 cudnn")
        for passes in ("forward", "backward", "both")
    ]


def loss(tokens: int, width: int, vocabulary: int) -> list[KernelSpec]:
    shape = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    return [LinearCrossEntropySpec(**shape, passes="both", peers="ours-compiled eager compile")]


SHAPES = [  # the most wanted first
    attention(2, 8, 4096, 256),
    attention(1, 16, 16384, 64),
    attention(1, 16, 16384, 128),
    loss(2048, 768, 10_000),
    loss(2048, 2560, 10_000),
    attention(2, 8, 4096, 160),
    attention(16, 8, 512, 256),
    attention(4, 16, 4096, 64),
    loss(8192, 768, 10_000),
    loss(4096, 2048, 32_000),
    attention(1, 16, 16384, 96),
    attention(4, 16, 4096, 128),
    attention(2, 8, 4096, 256, causal=False),
    attention(1, 1, 8192, 256),
]
TRIAL = [attention(1, 2, 32, 16), loss(16, 16, 64)]


def rows(trial: bool) -> Iterator[tuple[KernelSpec, str]]:
    shared = {"device": "cpu", "seconds": 0.0} if trial else {"device": "cuda", "seconds": 0.1}
    for shape in TRIAL if trial else SHAPES:
        for forced in FORCED:
            for spec in shape:
                # the peers in another order are another comparison: its results are checked again
                peers = spec.peers if forced == "default" else " ".join(reversed(spec.named_peers))
                yield dataclasses.replace(spec, peers=peers, **shared), forced


def measured(spec: KernelSpec, forced: str) -> dict:
    os.environ[cudnn.OPT_OUT] = "0" if forced == "kernels" else "1"
    by_torch.IS_ALLOWED = forced != "kernels"
    start_counting()
    record = with_launchers(comparison.run(spec))
    return {"forced": forced, **dataclasses.asdict(record)}


def told(row: dict) -> str:
    times = {
        name: metric["median"] for name, metric in row["metrics"].items() if name.endswith("_ms")
    }
    shape = " x ".join(
        str(row["spec"][name]) for name in comparison.OPERATIONS[row["kind"]].spec.shape
    )
    said = ", ".join(f"{name.removesuffix('_ms')} {ms:.4f}" for name, ms in times.items())
    ran = row["environment"].get("native", {})
    return f"{row['kind']} {shape} {row['spec']['passes']} {row['forced']}: {said} ms {ran or ''} {row['note']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=85.0, help="seconds for all")
    parser.add_argument("--trial", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start, status = time.monotonic(), 0
    for spec, forced in rows(options.trial):
        if time.monotonic() - start > options.budget:
            print(
                f"no time for {spec.kind} {[getattr(spec, name) for name in spec.shape]} {forced}"
            )
            status = 1
            continue
        row = measured(spec, forced)
        status |= row["status"] != "ok"
        with (options.out / "handed_over.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - start:4.0f} s  {told(row)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
