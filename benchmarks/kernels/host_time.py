"""Where the host's time goes in an eager step of a small network, by parts that are ours or torch's.

    PYTHONPATH=src python benchmarks/kernels/host_time.py OUT [--sizes small] [--of torch attention] [--trial]

The network of torch's parts, those with one of ours each, and that of ours alone stand in one process and
take turns, a step each. A phase's host time is from its call to its return, a step's until the GPU is done
with it; the next begins after that, so that launches never wait for a full queue. Writes OUT/host-time.jsonl
(median ms of each phase by each, a line a size) and, of forward by torch's parts and by ours, cProfile's
tables of functions by their own time and by that of all they call: OUT/forward-SIZE-{torch,ours}.txt.
--trial: nano on a CPU.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stepgauge.bench.build import build
from stepgauge.measure.devices import free_unused_memory, synchronize
from stepgauge.measure.environment import environment
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

TORCH = {"attention": "sdpa", "norm": "rmsnorm", "loss": "cross-entropy", "optimizer": "adamw"}
OURS = {"attention": "triton", "norm": "triton", "loss": "fused", "optimizer": "fused"}
WAYS = {"torch": TORCH, **{name: TORCH | {name: part} for name, part in OURS.items()}, "ours": OURS}
Phases = dict[str, Callable[[], None]]
WARMUP = 3


def phases_of(size: str, parts: dict[str, str], options: argparse.Namespace) -> Phases:
    *of_model, optimizer = parts.items()
    spec = StepSpec(
        model=ModelSpec.preset(size, context_length=options.context, **dict(of_model)),
        batch=options.batch,
        precision="bf16",
        optimizer=optimizer[1],
        device=options.device,
    )
    step, batch = build(spec, torch.device(options.device))
    return step.phases(batch)


def host_ms(phases: Phases, device: torch.device) -> dict[str, float]:
    synchronize(device)
    found, begin = {}, time.perf_counter()
    for name, phase in phases.items():
        start = time.perf_counter()
        phase()
        found[name] = (time.perf_counter() - start) * 1e3
    synchronize(device)
    return found | {"step": (time.perf_counter() - begin) * 1e3}


def profiled(phases: Phases, device: torch.device, steps: int) -> str:
    """cProfile of forward alone; the other phases run as they do in a step."""
    profiler = cProfile.Profile()
    for _ in range(steps):
        synchronize(device)
        for name, phase in phases.items():
            if name == "forward":
                profiler.runcall(phase)
            else:
                phase()
    text = io.StringIO()
    table = pstats.Stats(profiler, stream=text).strip_dirs()
    for order in ("tottime", "cumulative"):
        table.sort_stats(order).print_stats(70)
    return text.getvalue()


def medians_of(networks: dict[str, Phases], device: torch.device, steps: int) -> dict:
    """Host ms of each phase by each network, which take turns a step at a time."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in networks}
    for number in range(WARMUP + steps):
        for name, phases in networks.items():
            found = host_ms(phases, device)
            if number >= WARMUP:
                times[name].append(found)
    return {
        name: {phase: statistics.median(each[phase] for each in of_one) for phase in of_one[0]}
        for name, of_one in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["small"])
    parser.add_argument("--of", nargs="+", choices=[*WAYS], default=[*WAYS], help="these networks")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60, help="of each network")
    parser.add_argument("--trial", action="store_true")
    options = parser.parse_args()
    options.device = "cpu" if options.trial else "cuda"
    if options.trial:
        options.sizes, options.batch, options.context, options.steps = ["nano"], 1, 16, 1
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    gc.disable()
    for size in options.sizes:
        ways = {name: parts for name, parts in WAYS.items() if name in options.of}
        networks = {name: phases_of(size, parts, options) for name, parts in ways.items()}
        medians = medians_of(networks, device, options.steps)
        found = {"size": size, "environment": environment(device), "host_ms": medians}
        with (options.out / "host-time.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        for name, of_one in medians.items():
            print(f"{size} {name:10}", *(f"{phase} {ms:8.3f}" for phase, ms in of_one.items()))
        for name in {"torch", "ours"} & {*networks}:
            text = profiled(networks[name], device, min(20, options.steps))
            (options.out / f"forward-{size}-{name}.txt").write_text(text)
        networks.clear()  # before the next size takes memory
        free_unused_memory(device)


if __name__ == "__main__":
    main()
