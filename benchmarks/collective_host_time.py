"""Measures the host's time of eager tensor parallelism. Nothing is sent between ranks.

    PYTHONPATH=src python benchmarks/collective_host_time.py [OUT.jsonl]
    PYTHONPATH=../OTHER/src python benchmarks/collective_host_time.py [OUT.jsonl]   # another commit's

Times a single `gather_input`, and a block of a network so narrow that a CPU spends almost no time on
arithmetic, under tp2 and in one process. The block's time is the difference of 10 and 2 blocks, by
eight; both networks take turns. Prints a JSON line and appends it to OUT.jsonl: medians in us. The commit is
that of STEPGAUGE_COMMIT, if set.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepgauge.calibrate.host import narrow_network
from stepgauge.measure.environment import environment
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.step import StepSpec
from stepgauge.train.build import build_step
from stepgauge.train.data import random_batch
from stepgauge.train.layout import build_layout_step

FEW, MANY = 2, 10  # blocks
ROUNDS, STEPS, CALLS = 8, 12, 300


def phases_of(layout: str, blocks: int) -> Mapping[str, Callable[[], None]]:
    model, device = narrow_network(blocks, heads=2), torch.device("cpu")
    if layout == "none":
        step = build_step(StepSpec(model=model, batch=2, precision="bf16", device="cpu"), lr=1e-4)
    else:
        spec = LayoutSpec(model=model, layout=layout, batch=2, precision="bf16", device="cpu")
        step = build_layout_step(
            spec, layout=Layout.parse(layout), device=device, stages=[range(blocks)], lr=1e-4
        )
    return step.phases(random_batch(model.vocab_size, 2, model.context_length, 0))


def block_us(layout: str) -> dict[str, float]:
    """Returns the time of a block by phase."""
    built = {blocks: phases_of(layout, blocks) for blocks in (FEW, MANY)}
    times: dict[tuple[int, str], list[float]] = {}
    for number in range(ROUNDS):
        for blocks, phases in built.items():
            for _ in range(STEPS):
                for phase, call in phases.items():
                    start = time.perf_counter()
                    call()
                    if number:  # the first round warms up
                        elapsed = time.perf_counter() - start
                        times.setdefault((blocks, phase), []).append(elapsed)
    us = {key: 1e6 * statistics.median(values) for key, values in times.items()}
    return {
        phase: (us[MANY, phase] - us[FEW, phase]) / (MANY - FEW)
        for phase in ("forward", "backward")
    }


def gather_us() -> float:
    """Returns the time of a `gather_input` of a narrow tensor."""
    stream = ResidualStream(dist.group.WORLD)
    x = torch.randn(2, 16, 128, dtype=torch.bfloat16, requires_grad=True)
    means = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            stream.gather_input(x)
        means.append(1e6 * (time.perf_counter() - start) / CALLS)
    return statistics.median(means)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    row = {
        "gather_input_us": gather_us(),
        "block_us": {layout: block_us(layout) for layout in ("none", "tp2")},
        "environment": environment(torch.device("cpu")),
    }
    line = json.dumps(row)
    print(line)
    if len(sys.argv) > 1:
        with Path(sys.argv[1]).open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
