"""Data parallel wrappers beside one GPU and torch's, in rounds: each row is measured in several
rounds of one run, so that a host or a clock that drifts decides nothing.

    python benchmarks/data_parallel_rounds.py OUT
    python benchmarks/data_parallel_rounds.py OUT --size nano --batch 2 --device cpu  # that it runs

Parts, of which a round has all rows: `narrow` (2.7b, precision bf16-master, whose gradients are of 16
bits), `wide` (bf16 autocast over fp32 weights and gradients, with ways to send them), `cast` (the
same with --reduce-dtype bf16) and `small`. Writes a record a row and round to OUT/records.jsonl as
soon as it is there, with `round` and `way` in its environment, and a table of medians at the end.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.bench.data_parallel import DataParallelFigures, record
from stepgauge.bench.rank_figures import kept_bytes, time_steps
from stepgauge.bench.sweep import stamped
from stepgauge.measure import devices
from stepgauge.measure.timing import Phases
from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.runtime.launch import RankError, launch
from stepgauge.runtime.world import joined_world
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.model import ModelSpec
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.precision import PRECISIONS, REDUCE_DTYPES

# Ways that the gradients of a wrapper are sent; those of NCCL are settings of its communicator.
NCCL = {
    "32 blocks": {"min_ctas": 32, "max_ctas": 32},
    "no clusters": {"cga_cluster_size": 0},
    "12 blocks": {"min_ctas": 1, "max_ctas": 12},
}
BESIDE = [("none", ""), ("bucketed", "")]
SMALL = ("torch-ddp", "torch-ddp-views", "zero1", "zero2", "zero3", "torch-fsdp")
# Of each part: precision, reduce_dtype, its rows (wrapper, way), in how many rounds.
PARTS: dict[str, tuple[str, str, list[tuple[str, str]], int]] = {
    "narrow": ("bf16-master", "own", [*BESIDE, ("torch-ddp", ""), ("zero2", "")], 3),
    "wide": ("bf16", "own", [*BESIDE, ("zero3", ""), ("torch-fsdp", "")], 3),
    "cast": ("bf16", "bf16", [("bucketed", ""), ("torch-ddp", ""), ("zero2", "")], 1),
    "small": ("bf16", "own", [*BESIDE, *((wrapper, "") for wrapper in SMALL)], 2),
    "ways": ("bf16", "own", [("bucketed", way) for way in NCCL], 1),
}


def rows(arguments: argparse.Namespace) -> Iterator[tuple[int, str, DataParallelSpec]]:
    """Round, way and spec, round by round."""
    for number in range(max(rounds for *_, rounds in PARTS.values())):
        for part in arguments.only or PARTS:
            precision, reduce_dtype, ways, rounds = PARTS[part]
            size = "small" if part == "small" and arguments.size == "2.7b" else arguments.size
            for wrapper, way in ways if number < rounds else ():
                yield (
                    number,
                    way,
                    DataParallelSpec(
                        model=ModelSpec.preset(size, context_length=128),
                        size=size,
                        wrapper=wrapper,
                        precision=precision,
                        optimizer="fused" if precision == "bf16-master" else "adamw",
                        reduce_dtype=reduce_dtype,
                        batch=arguments.batch,
                        warmup=3,
                        steps=arguments.steps,
                        device=arguments.device,
                    ),
                )


@contextlib.contextmanager
def settings_of(spec: DataParallelSpec, way: str) -> Iterator[Settings]:
    autocast = PRECISIONS[spec.precision].autocast
    fields: dict[str, Any] = {
        "compute_dtype": autocast if WRAPPERS[spec.wrapper].shards("weights") else None,
        "reduce_dtype": REDUCE_DTYPES[spec.reduce_dtype],
    }
    if way not in NCCL or spec.device == "cpu":
        yield Settings(**fields)
        return
    options = dist.ProcessGroupNCCL.Options()
    for name, value in NCCL[way].items():
        setattr(options.config, name, value)
    group = dist.new_group(backend="nccl", pg_options=options)
    yield Settings(**fields, group=group)
    dist.destroy_process_group(group)


def traced(phases: Phases, path: Path, device: torch.device) -> None:
    """Two steps as the profiler of rank 0 sees them, host and device."""
    with torch.profiler.profile() as profile:
        for phase in [*phases.values()] * 2:
            phase()
        devices.synchronize(device)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


def measure(spec: DataParallelSpec, way: str, trace: Path | None) -> DataParallelFigures:
    """On every rank."""
    world = joined_world()
    assert world is not None, "ranks run in a world"
    device = world.device(spec.device)
    on_device = dataclasses.replace(spec, device=str(device))
    with settings_of(spec, way) as settings:
        spread = functools.partial(parallelise, spec.wrapper, settings=settings)
        step = build_step(on_device, parallelise=spread, lr=LEARNING_RATE)
        given = batch_for(spec.model, spec.batch, spec.seed + 1 + world.rank)
        phases = step.phases([part.to(device) for part in given])
        initial = devices.allocated_memory(device)
        with step.precision.matmul_mode():
            times = time_steps(spec, phases, device)
            kept = kept_bytes(step, phases, device, initial)
            if trace is not None:
                traced(phases, trace, device)
        name = step.optimizer_name
        del step, phases
    return DataParallelFigures(
        phases=times,
        bytes=kept,
        optimizer=name,
        without_communication=[],
        communication=[],
        plan={},
        traced=None,
    )


def campaign(arguments: argparse.Namespace, started: float) -> None:
    """On every rank; rank 0 writes."""
    for number, way, spec in rows(arguments):
        late = [time.time() - started > arguments.seconds]
        dist.broadcast_object_list(late)
        if late[0]:
            print("no time left for", number, spec.wrapper, way, flush=True)
            return
        begun = time.time()
        figures: list[Any] = [None] * dist.get_world_size()
        name = f"{spec.size}_{spec.precision}_{spec.wrapper}.json.gz"
        trace = arguments.out / name if spec.wrapper in arguments.trace and not number else None
        try:
            ours: DataParallelFigures | str = measure(spec, way, trace)
        except (RuntimeError, ValueError) as error:  # a setting that NCCL refuses
            ours = f"{spec.wrapper} {way}: {error}"
        dist.all_gather_object(figures, ours)
        devices.free_unused_memory(torch.device(spec.device))
        if any(isinstance(each, str) for each in figures):
            print(*figures, sep="\n", flush=True)
        elif dist.get_rank() == 0:
            found = record(spec, figures)
            how = {"round": number, "way": way, "seconds": round(time.time() - begun, 1)}
            found = dataclasses.replace(found, environment={**found.environment, **how})
            with open(arguments.out / "records.jsonl", "a") as file:
                file.write(stamped(found).to_json() + "\n")


def table(out: Path) -> str:
    """ms by row: the median of each round, and their median over that of one GPU in all rounds."""
    found: dict[tuple[str, ...], list[float]] = collections.defaultdict(list)
    for line in (out / "records.jsonl").read_text().splitlines():
        row = json.loads(line)
        spec, way = row["spec"], row["environment"]["way"]
        key = spec["size"], spec["precision"], spec["reduce_dtype"], spec["wrapper"], way
        found[key].append(row["metrics"]["step_ms"]["median"])
    alone = {key[:2]: statistics.median(ms) for key, ms in found.items() if key[3] == "none"}
    lines = []
    for key, ms in found.items():
        ratio = statistics.median(ms) / alone[key[:2]] if key[:2] in alone else float("nan")
        rounds = ", ".join(f"{value:.1f}" for value in ms)
        lines.append(f"{' '.join(key):45} {statistics.median(ms):8.1f} {ratio:6.3f}   {rounds}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--size", default="2.7b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--trace", nargs="*", default=[], help="wrappers, in the first round")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        launch(campaign, arguments, time.time(), ranks=2, device=arguments.device)
    except RankError as error:
        print(error, error.trace, sep="\n")
    print(table(arguments.out))


if __name__ == "__main__":
    main()
