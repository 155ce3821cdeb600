"""Measures a long training step on two GPUs under several plans of what backward recomputes.

    PYTHONPATH=src python benchmarks/recompute_plans.py OUT [--plans 11,23 10,24] [--trace] [--trial]

The network has 8 B parameters and one sequence of 32,768 tokens per rank, under ZeRO 3 with
compiled blocks. A plan is two numbers: how many blocks recompute their feed-forward layer, and how
many blocks keep the results of all matrix products. One process per rank runs all plans.

Appends a record per plan to OUT/records.jsonl as soon as it is measured. Two warm-up steps precede
the first plan, for compilation and the allocator, and one precedes each other plan. --trace writes
the kernels of one more step under the first plan to OUT/rank-N/trace.json.gz. --trial runs a small
network on a CPU.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.bench.rates import rates
from stepgauge.bench.sweep import stamped
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.measure.profiler import ProfilerSchedule, profile_phases
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.models.checkpointing import by_plan
from stepgauge.runtime.launch import launch
from stepgauge.runtime.world import joined_world
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.record import Record, Sample
from stepgauge.train.build import batch_for
from stepgauge.train.layout import build_layout_step
from stepgauge.train.rank_share import RankShare

LONG_SEQUENCE = ModelSpec(
    vocab_size=151_936, context_length=32_768, d_model=4096, d_ff=11_008, num_layers=34, num_heads=32,
    attention="triton", loss="fused",
)  # fmt: skip
SMALL = ModelSpec(
    vocab_size=64, context_length=32, d_model=32, d_ff=64, num_layers=4, num_heads=2, loss="fused"
)


def measure(
    model: ModelSpec, device_type: str, counts: list[tuple[int, int]], out: Path, trace: bool
) -> None:
    """Runs on both ranks. Rank 0 writes the records."""
    world = joined_world()
    assert world is not None
    device = world.device(device_type)
    spec = LayoutSpec(
        model=model, layout="dp2 zero3", batch=2, precision="bf16", compile="blocks",
        checkpointing="feed-forward", warmup=2, steps=2, device=device_type,
    )  # fmt: skip
    step = build_layout_step(spec, layout=spec.parsed_layout, device=device, lr=LEARNING_RATE)
    batch = batch_for(model, spec.batch, spec.seed + 1)
    share = [part.to(device) for part in RankShare.of(spec.parsed_layout, world.rank).shares(batch)]
    for number, (feed_forward, selective) in enumerate(counts):
        steps = 1 if number else 2
        plan = RecomputePlan(model.num_layers, feed_forward=feed_forward, selective=selective)
        step.module.through_blocks = functools.partial(by_plan, plan=plan, compiled_blocks=True)
        devices.reset_peak_memory(device)
        times = time_phases(step.phases(share), device, warmup=steps, steps=steps)
        if world.rank == 0:
            record = _record(spec, plan, times, device)
            with (out / "records.jsonl").open("a") as file:
                file.write(record.to_json() + "\n")
            print(
                plan, {name: sample.median for name, sample in record.metrics.items()}, flush=True
            )
        if trace and not number:
            _trace(step.phases(share), device, out / f"rank-{world.rank}")


def _trace(phases: Phases, device: torch.device, folder: Path) -> None:
    """Writes the kernels of both ranks. A rank without a profiler would run ahead of the other."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule = ProfilerSchedule(wait=0, warmup=1, active=1)
    _, watched = profile_phases(phases, device, folder, schedule=schedule, kernels_only=True)
    print("profiled", folder.name, watched, flush=True)


def _record(
    spec: LayoutSpec, plan: RecomputePlan, times: dict[str, list[float]], device: torch.device
) -> Record:
    metrics: dict[str, Any] = {f"{name}_ms": Sample.of(ms, "ms") for name, ms in times.items()}
    metrics |= rates(spec, times["step"], sequences=spec.batch, ranks=2)
    peaks = devices.peak_memory(device)
    metrics |= {name: Sample.exact(value, "bytes") for name, value in peaks.items()}
    described = {**environment(device), "checkpointing": str(plan)}
    return stamped(Record.of(spec, metrics=metrics, environment=described, note=f"rank 0; {plan}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plans", nargs="+", default=["11,23", "10,24"], help="see above")
    parser.add_argument("--trace", action="store_true", help="trace a step under the first plan")
    parser.add_argument("--trial", action="store_true", help="a small network on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    counts = [tuple(map(int, plan.split(","))) for plan in options.plans]
    model, device = (SMALL, "cpu") if options.trial else (LONG_SEQUENCE, "cuda")
    counts = [(2, 2), (4, 0)] if options.trial else counts
    launch(measure, model, device, counts, options.out, options.trace, ranks=2, device=device)


if __name__ == "__main__":
    main()
