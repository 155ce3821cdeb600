"""Measures whether this machine's host keeps its speed while several ranks share it.

    python benchmarks/host_steadiness.py --ranks 2              # 2 GPUs, 15 seconds
    python benchmarks/host_steadiness.py --ranks 2 --device cpu

Each rank launches the eager step of a narrow network, all at the same time. Prints the median time of
a block's forward and backward for every half second of each rank. Exits with 1 if the slowest is more
than --most times the fastest: then no calibration predicts steps that wait for the host.
"""

import argparse
import statistics
import sys
import time

from stepgauge.runtime.workers import Workers

LAYERS, PART_S = 10, 0.5


def blocks_us(device: str, seconds: float) -> list[list[float]]:
    """Runs on each rank. Returns, for each rank, a block's median time in each part of the time."""
    import torch
    import torch.distributed as dist

    from stepgauge.bench.build import LEARNING_RATE
    from stepgauge.calibrate.host import LENGTH, VOCABULARY, narrow_network
    from stepgauge.measure.devices import synchronize
    from stepgauge.spec.step import StepSpec
    from stepgauge.train.build import build_step
    from stepgauge.train.data import random_batch

    where = torch.device(device)  # of this rank
    spec = StepSpec(model=narrow_network(LAYERS), batch=1, precision="bf16", device=device)
    step = build_step(spec, lr=LEARNING_RATE)
    phases = step.phases([part.to(where) for part in random_batch(VOCABULARY, 1, LENGTH, 0)])
    found: list[float] = []
    for _ in range(1 + round(seconds / PART_S)):  # the first part warms up
        dist.barrier()
        times, end = list[float](), time.perf_counter() + PART_S
        while time.perf_counter() < end:
            synchronize(where)
            start = time.perf_counter()
            phases["forward"]()
            phases["backward"]()
            times.append((time.perf_counter() - start) * 1e6 / LAYERS)
        found.append(statistics.median(times))
    of_ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found[1:])
    return of_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--most", type=float, default=1.25)
    arguments = parser.parse_args()
    for name, least in (("ranks", 1), ("seconds", PART_S)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least {least}")
    with Workers() as workers:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        of_ranks = workers.call(
            blocks_us, arguments.device, arguments.seconds,
            ranks=arguments.ranks, device=arguments.device, backend=backend,
        )  # fmt: skip
    for rank, parts in enumerate(of_ranks):
        print(f"rank {rank}, us per block:", " ".join(f"{us:.0f}" for us in parts))
    slowest, fastest = max(map(max, of_ranks)), min(map(min, of_ranks))
    print(f"the slowest half second took {slowest / fastest:.2f} times the fastest")
    sys.exit(slowest > arguments.most * fastest)


if __name__ == "__main__":
    main()
