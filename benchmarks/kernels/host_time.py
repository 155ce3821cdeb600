"""Measures where the host's time goes in an eager step of a small network, with our or torch's parts.

    PYTHONPATH=src python benchmarks/kernels/host_time.py OUT [--sizes small] [--of torch attention] [--trial]

One network runs with torch's parts, with one part of ours, with all of ours, and once more with
torch's and ours. These take turns, one step each. The host time of a phase is the time from its
call to its return. A step's time also includes the GPU's work; the next step begins after it, so
that launches never wait for a full queue.

Appends a line per size to OUT/host-time.jsonl: median ms of each phase. For forward with torch's
and with our parts it writes cProfile's tables to OUT/forward-SIZE-{torch,ours}.txt, sorted by the
own time of functions and by the time including their callees. --trial runs nano on a CPU.
"""

import argparse
import cProfile
import functools
import gc
import io
import json
import pstats
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from stepgauge.bench.build import build
from stepgauge.kernels.rms_norm import TritonRMSNorm
from stepgauge.measure.devices import free_unused_memory, synchronize
from stepgauge.measure.environment import environment
from stepgauge.models.parts import ATTENTIONS, LOSSES, build_optimizer
from stepgauge.models.transformer import Attention
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

TORCH = {"attention": "sdpa", "norm": "rmsnorm", "loss": "cross-entropy", "optimizer": "adamw"}
OURS = {"attention": "triton", "norm": "triton", "loss": "fused", "optimizer": "fused"}
WAYS = {
    "torch": TORCH,
    **{name: TORCH | {name: part} for name, part in OURS.items()},
    "ours": OURS,
    "torch again": TORCH,
    "ours again": OURS,
}
Phases = dict[str, Callable[[], None]]
WARMUP = 3


class Network:
    """A network whose parts are replaced between steps. Two equal networks in one process differ by
    up to 10 %, which is more than the difference between parts.
    """

    def __init__(self, size: str, options: argparse.Namespace):
        model = ModelSpec.preset(size, context_length=options.context)
        spec = StepSpec(model=model, batch=options.batch, precision="bf16", device=options.device)
        self.step, batch = build(spec, torch.device(options.device))
        self.model = self.step.module
        self.phases = self.step.phases(batch)
        self.norms = [m for m in self.model.modules() if isinstance(m, nn.RMSNorm)]
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        groups = self.step.optimizer.param_groups
        self.optimizers = {
            name: build_optimizer(name, [{**group} for group in groups], lr=groups[0]["lr"])
            for name in (TORCH["optimizer"], OURS["optimizer"])
        }

    def use(self, parts: dict[str, str]) -> None:
        """Replaces the norms, attention, loss and optimizer."""
        kind = TritonRMSNorm if parts["norm"] == "triton" else nn.RMSNorm
        for norm in self.norms:
            norm.__class__ = kind
        attend = functools.partial(ATTENTIONS[parts["attention"]], is_causal=True)
        for attention in self.attentions:
            attention.attend = attend
        self.model.compute_loss = LOSSES[parts["loss"]]
        self.step.optimizer = self.optimizers[parts["optimizer"]]


def host_ms(phases: Phases, device: torch.device) -> dict[str, float]:
    """Runs a step and returns host ms of each phase, and of the step with the GPU's work."""
    synchronize(device)
    found, begin = {}, time.perf_counter()
    for name, phase in phases.items():
        start = time.perf_counter()
        phase()
        found[name] = (time.perf_counter() - start) * 1e3
    synchronize(device)
    return found | {"step": (time.perf_counter() - begin) * 1e3}


def profiled(phases: Phases, device: torch.device, steps: int) -> str:
    """Returns cProfile's tables of forward. The other phases run without the profiler."""
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


def medians_of(network: Network, ways: dict, device: torch.device, steps: int) -> dict:
    """Returns the median host ms of each phase with each choice of parts. They take turns, one step
    each, in random order.
    """
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(WARMUP + steps):
        for name in order.sample([*ways], len(ways)):
            network.use(ways[name])
            found = host_ms(network.phases, device)
            if number >= WARMUP:
                times[name].append(found)
    return {
        name: {phase: statistics.median(each[phase] for each in by_step) for phase in by_step[0]}
        for name, by_step in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["small"])
    parser.add_argument(
        "--of", nargs="+", choices=[*WAYS], default=[*WAYS], help="measure these choices of parts"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60, help="of each choice of parts")
    parser.add_argument("--trial", action="store_true", help="nano, on a CPU")
    options = parser.parse_args()
    options.device = "cpu" if options.trial else "cuda"
    if options.trial:
        options.sizes, options.batch, options.context, options.steps = ["nano"], 1, 16, 1
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    gc.disable()
    for size in options.sizes:
        ways = {name: WAYS[name] for name in options.of}
        network = Network(size, options)
        medians = medians_of(network, ways, device, options.steps)
        found = {"size": size, "environment": environment(device), "host_ms": medians}
        with (options.out / "host-time.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        for name, by_step in medians.items():
            print(f"{size} {name:10}", *(f"{phase} {ms:8.3f}" for phase, ms in by_step.items()))
        for name in {"torch", "ours"} & {*ways}:
            network.use(ways[name])
            text = profiled(network.phases, device, min(20, options.steps))
            (options.out / f"forward-{size}-{name}.txt").write_text(text)
        del network  # frees memory for the next size
        free_unused_memory(device)


if __name__ == "__main__":
    main()
