"""Compares stepgauge's times of collectives with those of a plain torch.distributed loop.

    python benchmarks/comm_plain.py OUT.jsonl --device cuda --ranks 4 --sizes 524288 1048576

stepgauge times collectives as `stepgauge bench comm` does. The plain loop uses nothing of
stepgauge: tensors, a warm-up, and calls between two CUDA events (on a CPU, between two perf_counter
readings). Both run in the same processes and alternate. Appends one line per operation and size to
OUT.jsonl with the medians over rounds of the slowest rank: `ours_ms` is stepgauge's, `plain_ms` the
loop's.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stepgauge.bench.ranks import slowest
from stepgauge.measure.collectives import Collective, time_collective
from stepgauge.runtime.launch import launch
from stepgauge.runtime.world import joined_world
from stepgauge.spec.comm import CommSpec

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
ROUNDS = 3


def plain_call(op, size_bytes, device):
    """Returns a function that runs the collective once on float32 tensors of that size."""
    rank, n = dist.get_rank(), dist.get_world_size()
    count = size_bytes // 4 // n * n
    whole, part = torch.ones(count, device=device), torch.ones(count // n, device=device)
    received = torch.empty_like(whole)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def send_recv():
        sends = [
            dist.P2POp(dist.isend, whole, (rank + 1) % n),
            dist.P2POp(dist.irecv, received, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(received, whole),
        "send_recv": send_recv,
    }[op]


def plain_ms(call, calls, device):
    """Returns milliseconds per call."""
    for _ in range(5):
        call()
    if device.type != "cuda":
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls
    torch.cuda.synchronize()
    dist.barrier()
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def compare(device_name, sizes, seconds):
    """Runs on each rank. Returns a row (op, bytes, busbw factor, stepgauge's ms of each round, the
    plain loop's ms of each round) for each operation and size.
    """
    device = joined_world().device(device_name)
    rows = []
    for op in OPS:
        for size in sizes:
            spec = CommSpec(
                op=op,
                backend="nccl" if device.type == "cuda" else "gloo",
                size_bytes=size,
                ranks=dist.get_world_size(),
                seconds=seconds,
                device=device.type,
            )
            collective = Collective(spec, device)
            wrong = collective.wrong()
            assert wrong == 0, f"{op} of {size} bytes: {wrong} elements are wrong"
            call = plain_call(op, size, device)
            ours, plain = [], []
            for _ in range(ROUNDS):
                times, calls = time_collective(collective)
                ours.append(statistics.median(times))
                plain.append(statistics.median(plain_ms(call, calls, device) for _ in range(5)))
            rows.append((op, spec.bytes, spec.factor, ours, plain))
            del collective, call
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each timing")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="in bytes")
    arguments = parser.parse_args()
    by_rank = launch(
        compare,
        arguments.device,
        arguments.sizes,
        arguments.seconds,
        ranks=arguments.ranks,
        device=arguments.device,
    )
    with arguments.out.open("a") as lines:
        for rows in zip(*by_rank, strict=True):
            op, size, factor, *_ = rows[0]
            ours, plain = (
                statistics.median(slowest([row[side] for row in rows])) for side in (3, 4)
            )
            ratio = plain / ours  # of bandwidths: stepgauge's over the plain loop's
            busbw = size / ours / 1e6 * factor
            line = {"op": op, "ranks": arguments.ranks, "size_bytes": size, "ours_ms": ours, "plain_ms": plain,
                    "ours_over_plain_busbw": ratio, "busbw_gb_per_s": busbw}  # fmt: skip
            lines.write(json.dumps(line) + "\n")
            print(f"{op:15} {arguments.ranks} ranks {size:>13,} B  stepgauge {ours:9.4f} ms  plain {plain:9.4f} ms  "
                  f"busbw {busbw:7.1f} GB/s  stepgauge/plain {ratio:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
