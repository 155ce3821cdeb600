"""Measures which work becomes slower on a slower host: Python, torch's dispatch or the driver.

    python benchmarks/host_pace.py OUT                    # a GPU, 20 seconds
    python benchmarks/host_pace.py OUT --device cpu --seconds 1

Runs the eager step of the size small in three processes, one after another. The last process may
use only two cores. Three fixed probes follow each step: a Python loop, calls that dispatch but
compute nothing, and launches of a tiny kernel.

Appends one line per process to OUT/host_pace.jsonl. For each step it has the wall time of the
phases and probes, the CPU time of the process (all in ms), and the number of context switches:
voluntary (`waited`) and involuntary (`taken_off`).
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

PYTHON_LOOPS, DISPATCHES, LAUNCHES = 4000, 200, 100
MODES = ("free", "free", "two cores")


def pace(mode: str, device: str, seconds: float) -> dict[str, list[float]]:
    """Runs in a new process. Returns the figures of every step, by name."""
    if mode == "two cores":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    import torch

    from stepgauge.measure.devices import synchronize
    from stepgauge.spec.model import ModelSpec
    from stepgauge.spec.step import StepSpec
    from stepgauge.train.build import batch_for, build_step

    where = torch.device(device)
    size = "small" if where.type == "cuda" else "nano"
    model = ModelSpec.preset(size, context_length=128)
    spec = StepSpec(model=model, size=size, batch=2, precision="bf16", device=device)
    step = build_step(spec, lr=1e-4)
    phases = step.phases([part.to(where) for part in batch_for(model, 2, 0)])
    tiny = torch.zeros(8, device=where)
    probes = {
        "python": lambda: [number * number for number in range(PYTHON_LOOPS)],
        "dispatch": lambda: [tiny.view(2, 4) for _ in range(DISPATCHES)],
        "launch": lambda: [tiny.add_(0.0) for _ in range(LAUNCHES)],
    }
    found: dict[str, list[float]] = {}
    for warm_up in (True, False):
        end = time.perf_counter() + (1.0 if warm_up else seconds)
        found = {}
        while time.perf_counter() < end:
            one_step(phases | probes, found)
            synchronize(where)
    return found


def one_step(calls: dict[str, Callable[[], object]], found: dict[str, list[float]]) -> None:
    """Runs each call once. Appends its ms, the CPU time of the process and its context switches."""
    cpu, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        found.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
    found.setdefault("wall", []).append((time.perf_counter() - begin) * 1e3)
    found.setdefault("cpu", []).append((time.process_time() - cpu) * 1e3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    found.setdefault("waited", []).append(after.ru_nvcsw - before.ru_nvcsw)
    found.setdefault("taken_off", []).append(after.ru_nivcsw - before.ru_nivcsw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.5, help="for each process")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "host_pace.jsonl").open("a") as file:
        for mode in MODES:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(pace, (mode, arguments.device, arguments.seconds))
            medians = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
            print(mode, {name: round(value, 3) for name, value in medians.items()}, flush=True)
            file.write(json.dumps({"mode": mode, "medians": medians, "steps": found}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
