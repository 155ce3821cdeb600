"""Times data parallel wrappers next to one GPU and torch's wrappers, in several rounds of one run.
Each row is measured once per round, so that a drifting clock or host does not decide the result.

    python benchmarks/data_parallel_rounds.py OUT
    python benchmarks/data_parallel_rounds.py OUT --only narrow small
    python benchmarks/data_parallel_rounds.py OUT --only blocks --ranks 4
    python benchmarks/data_parallel_rounds.py OUT --size nano --batch 2 --device cpu  # a trial

| part | what it measures |
| --- | --- |
| narrow | 2.7b in precision bf16-master: gradients have 16 bits |
| wide | 2.7b in bf16 autocast: weights and gradients are fp32 |
| cast | as wide, with --reduce-dtype bf16 |
| small | the size small in bf16 autocast |
| ways | as wide, bucketed only, with different settings of the NCCL communicator |
| blocks | 16 compiled blocks 4096 wide, 2 × 4096 tokens per GPU: ZeRO 3 |

Appends a record per row and round to OUT/records.jsonl as soon as it is measured. Its environment
has `round` and `way` (the NCCL settings). Prints a table of medians at the end.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_rows import SHAPE, TINY

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

# NCCL's kernels run on a stream of high priority, so they start before other kernels that wait.
HIGH_PRIORITY = "high priority"
# Name -> settings of the NCCL communicator that sends the gradients.
NCCL: dict[str, dict[str, int]] = {
    "32 blocks": {"min_ctas": 32, "max_ctas": 32},
    "no clusters": {"cga_cluster_size": 0},
    "12 blocks": {"min_ctas": 1, "max_ctas": 12},
    HIGH_PRIORITY: {},
}
REFERENCE_ROWS = [("none", ""), ("bucketed", "")]
SMALL_WRAPPERS = ("torch-ddp", "torch-ddp-views", "zero1", "zero2", "zero3", "torch-fsdp")
# Part -> precision, reduce_dtype, rows as (wrapper, NCCL settings), number of rounds.
PARTS: dict[str, tuple[str, str, list[tuple[str, str]], int]] = {
    "narrow": (
        "bf16-master",
        "own",
        [*REFERENCE_ROWS, ("bucketed", HIGH_PRIORITY), ("torch-ddp", ""), ("zero2", "")],
        3,
    ),
    "wide": ("bf16", "own", [*REFERENCE_ROWS, ("zero3", ""), ("torch-fsdp", "")], 3),
    "cast": ("bf16", "bf16", [("bucketed", ""), ("torch-ddp", ""), ("zero2", "")], 1),
    "small": ("bf16", "own", [*REFERENCE_ROWS, *((wrapper, "") for wrapper in SMALL_WRAPPERS)], 2),
    "ways": ("bf16", "own", [("bucketed", name) for name in NCCL], 1),
    "blocks": (
        "bf16-pure",
        "own",
        [("none", ""), ("zero3", ""), ("zero3", HIGH_PRIORITY), ("torch-fsdp", "")],
        3,
    ),
}


def rows(arguments: argparse.Namespace) -> Iterator[tuple[int, str, DataParallelSpec]]:
    """Yields (round, NCCL settings, spec), round by round."""
    for number in range(max(rounds for *_, rounds in PARTS.values())):
        for part in arguments.only or PARTS:
            precision, reduce_dtype, part_rows, rounds = PARTS[part]
            for wrapper, nccl_settings in part_rows if number < rounds else ():
                yield (
                    number,
                    nccl_settings,
                    DataParallelSpec(
                        **network_of(part, arguments),
                        wrapper=wrapper,
                        ranks=arguments.ranks,
                        precision=precision,
                        optimizer="fused" if precision == "bf16-master" else "adamw",
                        reduce_dtype=reduce_dtype,
                        warmup=3,
                        steps=arguments.steps,
                        device=arguments.device,
                    ),
                )


def network_of(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the spec that are about the network and the batch."""
    if part != "blocks":
        size = "small" if part == "small" and arguments.size == "2.7b" else arguments.size
        preset = ModelSpec.preset(size, context_length=128)
        return {"model": preset, "size": size, "batch": arguments.batch}
    if arguments.device == "cpu":
        return {"model": ModelSpec(num_layers=2, context_length=128, **TINY), "batch": 2}
    blocks = ModelSpec(
        num_layers=16, context_length=4096, attention="triton", loss="fused", **SHAPE
    )
    return {"model": blocks, "batch": 2, "compile": "blocks"}


@contextlib.contextmanager
def settings_of(spec: DataParallelSpec, nccl_settings: str) -> Iterator[Settings]:
    """Yields the wrapper's settings, with a communicator of its own if NCCL settings are named."""
    autocast = PRECISIONS[spec.precision].autocast
    fields: dict[str, Any] = {
        "compute_dtype": autocast if WRAPPERS[spec.wrapper].shards("weights") else None,
        "reduce_dtype": REDUCE_DTYPES[spec.reduce_dtype],
    }
    if nccl_settings not in NCCL or spec.device == "cpu":
        yield Settings(**fields)
        return
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=nccl_settings == HIGH_PRIORITY)
    for name, value in NCCL[nccl_settings].items():
        setattr(options.config, name, value)
    group = dist.new_group(backend="nccl", pg_options=options)
    yield Settings(**fields, group=group)
    dist.destroy_process_group(group)


def write_trace(phases: Phases, path: Path, device: torch.device) -> None:
    """Profiles two steps on each rank. Rank 0 writes its trace, with host and device events."""
    with torch.profiler.profile() as profile:
        for phase in [*phases.values()] * 2:
            phase()
        devices.synchronize(device)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


def measure(spec: DataParallelSpec, nccl_settings: str, trace: Path | None) -> DataParallelFigures:
    """Runs on every rank: builds the wrapped step and measures it."""
    world = joined_world()
    assert world is not None, "ranks run in a world"
    device = world.device(spec.device)
    on_device = dataclasses.replace(spec, device=str(device))
    with settings_of(spec, nccl_settings) as settings:
        wrap = functools.partial(parallelise, spec.wrapper, settings=settings)
        step = build_step(on_device, parallelise=wrap, lr=LEARNING_RATE)
        batch = batch_for(spec.model, spec.batch, spec.seed + 1 + world.rank)
        phases = step.phases([part.to(device) for part in batch])
        initial = devices.allocated_memory(device)
        with step.precision.matmul_mode():
            times, span = time_steps(spec, phases, device)
            kept = kept_bytes(step, phases, device, initial)
            if trace is not None:
                write_trace(phases, trace, device)
        name = step.optimizer_name
        del step, phases
    return DataParallelFigures(
        phases=times,
        bytes=kept,
        optimizer=name,
        span=span,
        without_communication=[],
        communication=[],
        plan={},
        traced=None,
    )


def campaign(arguments: argparse.Namespace, started: float) -> None:
    """Runs on every rank. Rank 0 writes the records."""
    for number, nccl_settings, spec in rows(arguments):
        is_late = [time.time() - started > arguments.seconds]
        dist.broadcast_object_list(is_late)
        if is_late[0]:
            print("no time left for round", number, spec.wrapper, nccl_settings, flush=True)
            return
        begin = time.time()
        figures: list[Any] = [None] * dist.get_world_size()
        name = f"{spec.size}_{spec.precision}_{spec.wrapper}.json.gz"
        trace = arguments.out / name if spec.wrapper in arguments.trace and not number else None
        try:
            own: DataParallelFigures | str = measure(spec, nccl_settings, trace)
        except (RuntimeError, ValueError) as error:  # for example, NCCL rejects a setting
            own = f"{spec.wrapper} {nccl_settings}: {error}"
        dist.all_gather_object(figures, own)
        devices.free_unused_memory(torch.device(spec.device))
        if any(isinstance(each, str) for each in figures):
            print(*figures, sep="\n", flush=True)
        elif dist.get_rank() == 0:
            found = record(spec, figures)
            about = {
                "round": number,
                "way": nccl_settings,
                "seconds": round(time.time() - begin, 1),
            }
            found = dataclasses.replace(found, environment={**found.environment, **about})
            with open(arguments.out / "records.jsonl", "a") as file:
                file.write(stamped(found).to_json() + "\n")


def table(out: Path) -> str:
    """Returns a line per row: the median of its rounds in ms, its ratio to one GPU, and each round."""
    found: dict[tuple[str, ...], list[float]] = collections.defaultdict(list)
    for line in (out / "records.jsonl").read_text().splitlines():
        row = json.loads(line)
        spec, nccl_settings = row["spec"], row["environment"]["way"]
        key = spec["size"], spec["precision"], spec["reduce_dtype"], spec["wrapper"], nccl_settings
        found[key].append(row["metrics"]["step_ms"]["median"])
    one_gpu = {key[:2]: statistics.median(ms) for key, ms in found.items() if key[3] == "none"}
    lines = []
    for key, ms in found.items():
        ratio = statistics.median(ms) / one_gpu[key[:2]] if key[:2] in one_gpu else float("nan")
        rounds = ", ".join(f"{value:.1f}" for value in ms)
        lines.append(f"{' '.join(key):45} {statistics.median(ms):8.1f} {ratio:6.3f}   {rounds}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150, help="start no row after this time")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="2.7b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--trace", nargs="*", default=[], help="trace these wrappers in the first round"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = False
    try:
        launch(campaign, arguments, time.time(), ranks=arguments.ranks, device=arguments.device)
    except RankError as error:
        print(error, error.trace, sep="\n")
        failed = True
    if (arguments.out / "records.jsonl").exists():
        print(table(arguments.out))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
