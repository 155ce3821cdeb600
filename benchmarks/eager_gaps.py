"""Times short operations on a GPU in a CUDA graph, and launched one by one by a host that is ahead.

    python benchmarks/eager_gaps.py OUT            # on one GPU, about 10 s

`stepgauge calibrate` times short operations in CUDA graphs. How much longer does a kernel take from the start
of the one before it, if each is launched by the host?

Appends a line per operation to OUT/eager_gaps.jsonl, and one for all of them in turn. In µs per call:
`graph` in a graph, `eager` launched while the GPU is still busy, and `kernels` the time of its kernels
alone, from the profiler. `launches` is the number of kernels of a call. Records of 2026-11-30 lack the last two,
which counted the kernel that keeps the GPU busy.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from versions import versions

from stepgauge.calibrate import calls
from stepgauge.calibrate.timing import loop
from stepgauge.runtime.recording import Call, on_capture_stream, record_repeated

MOST_LAUNCHES, ROUNDS = 300, 7  # the launch queue has room for about a thousand
BUSY_CYCLES = 60_000_000  # about 30 ms, in which the host launches all calls


def operations(device: torch.device) -> dict[str, Call]:
    """Returns calls of operations with the sizes of a block of 2.7b over 2560 tokens."""
    bf16, fp32, numel = torch.bfloat16, torch.float32, 2560 * 2560
    return {
        "cast fp32 bf16": calls.cast(fp32, bf16, numel, device),
        "cast bf16 fp32": calls.cast(bf16, fp32, 4 * numel, device),
        "gradient sum fp32": calls.gradient_sum(fp32, 4 * numel, device),
        "traffic": calls.traffic(8 * numel, device),
        "residual mixed": calls.residual(numel, device),
        "matmul nt bf16": calls.matmul("nt", bf16, 2560, 2560, 2560, device),
        "matmul tn bf16": calls.matmul("tn", bf16, 2560, 2560, 2560, device),
        "heads backward bf16": calls.eager_pass("heads", True, bf16, 2560, 5120, device),
        "rmsnorm backward fp32": calls.norm("rmsnorm", True, fp32, 2560, 2560, device),
    }


def eager_us(call: Call, device: torch.device, count: int) -> float:
    """Returns the median µs of a call among `count` that are all launched before the first one runs."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda._sleep(BUSY_CYCLES)
        times.append(loop(call, device, count))
    return statistics.median(times)


def graph_us(call: Call, device: torch.device, count: int) -> float:
    """Returns the median µs of a call in a CUDA graph of `count`."""
    replay = record_repeated(call, count, device)
    assert replay is not None, "these calls can be recorded"
    for _ in range(3):
        replay()
    return statistics.median(loop(replay, device, 2) for _ in range(ROUNDS)) / count


def kernels_of(call: Call, device: torch.device, count: int) -> tuple[float, float]:
    """Returns the µs of a call's kernels and their number."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loop(call, device, count)
    found = [
        event
        for event in profiler.key_averages()
        if event.self_device_time_total and not event.key.startswith(("aten", "cuda"))
    ]
    us = sum(event.self_device_time_total for event in found)
    return us / count, sum(event.count for event in found) / count


def in_turn(all_calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in all_calls:
            call()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    device = torch.device("cuda", 0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with on_capture_stream(device), (arguments.out / "eager_gaps.jsonl").open("a") as lines:
        named = operations(device)
        for name, call in {**named, "all in turn": in_turn(list(named.values()))}.items():
            call()
            _, launches = kernels_of(call, device, 10)
            count = max(1, MOST_LAUNCHES // max(1, round(launches)))
            kernels, launches = kernels_of(call, device, count)
            row = {
                **versions(trial=False),
                "operation": name,
                "launches": launches,
                "kernels": round(kernels, 2),
                "graph": round(graph_us(call, device, count), 2),
                "eager": round(eager_us(call, device, count), 2),
            }
            print(row)
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
