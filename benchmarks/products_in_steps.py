"""Compares matrix products inside a training step with the same products timed by themselves.

    python benchmarks/products_in_steps.py OUT                # about 90 s on a GPU
    python benchmarks/products_in_steps.py OUT --small        # on a CPU, to check that it runs

torch's profiler gives the time of each product in eager steps, and a step before them keeps the operands of
the first product of each shape. Then each shape is timed in six ways, of which "calibrate" is the one of
stepgauge calibrate:

  calibrate   noise as operands, alternating with a pass over 256 MiB
  profiled    the same by the profiler, that is without the gaps between kernels
  operands    the step's operands, alternating with the same pass
  norm        noise, alternating with RMSNorms of the step's tokens
  busy        noise, with the pass, after a warm-up of a second instead of 0.1 s
  back        noise, back to back

Appends a JSON line per shape to OUT/products.jsonl, with the time of each call in a step, in order. Prints
the time of all products of a step in each way relative to their time in the step. Shapes are m, n, k and the
layout: nt is a linear layer's forward, nn its input gradient, tn its weight gradient.
"""

import argparse
import collections
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.bench.build import build
from stepgauge.calibrate import calls
from stepgauge.calibrate.operations import PASSES, other_work
from stepgauge.calibrate.timing import OtherWork, clock_and_power, loop, time_of
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

WARM_UP, STEPS = 2, 5
TIMED_MS, WARM_UP_MS = 15.0, 100.0
# size, sequences, tokens, precision
SPECS = (
    ("2.7b", 8, 512, "bf16-master"),
    ("xl", 8, 2048, "bf16-master"),
    ("medium", 16, 512, "fp32"),
)
Product = tuple[str, int, int, int]  # layout, m, n, k


class Products(TorchDispatchMode):
    """Notes each product in order, and keeps the operands of the first of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []
        self.operands: dict[Product, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            product = _layout(left, right), left.shape[0], right.shape[1], left.shape[1]
            self.seen.append(product)
            if product not in self.operands:
                self.operands[product] = _copy(left), _copy(right)
        return function(*args, **(kwargs or {}))


def _layout(left: Tensor, right: Tensor) -> str:
    if left.stride(0) == 1 and left.shape[0] > 1:
        return "tn"
    return "nt" if right.stride(0) == 1 and right.shape[0] > 1 else "nn"


def _copy(operand: Tensor) -> Tensor:
    """Returns a copy with the same strides."""
    copy = torch.empty_strided(
        operand.shape, operand.stride(), dtype=operand.dtype, device=operand.device
    )
    return copy.copy_(operand)


def norms(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> OtherWork | None:
    if device.type == "cpu":
        return None
    x = torch.randn(tokens, width, dtype=dtype, device=device)
    call = functools.partial(torch.nn.functional.rms_norm, x, (width,))
    call()
    return OtherWork(call, loop(call, device, 10))


def time_in_steps(
    spec: StepSpec, device: torch.device
) -> tuple[dict[Product, list[float]], dict[Product, tuple[Tensor, Tensor]], dict[str, float]]:
    """Returns the microseconds of each product of a step, with one value for each of its calls (the median
    over steps), its operands, and the GPU's clock and power at the end of the steps.
    """
    step, batch = build(spec, device)
    phases, products = step.phases(batch), Products()

    def run() -> None:
        for phase in phases.values():
            phase()

    with step.precision.matmul_mode():
        with products:
            run()
        for _ in range(WARM_UP):
            run()
        us, readings = profiled_products(run, STEPS, device)
    times = collections.defaultdict(list)
    for number, product in enumerate(products.seen):
        times[product].append(statistics.median(us[number :: len(products.seen)]))
    return times, products.operands, readings


def profiled_products(
    run: Callable[[], object], repeats: int, device: torch.device
) -> tuple[list[float], dict[str, float]]:
    """Returns the microseconds that the profiler gives for each product, in order, and the clock and power
    when the host has launched everything.
    """
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        for _ in range(repeats):
            run()
        readings = clock_and_power(device)
        devices.synchronize(device)
    called = sorted(
        (event for event in profile.events() if event.name in ("aten::mm", "aten::addmm")),
        key=lambda event: event.time_range.start,
    )
    kernels = [sum(kernel.duration for kernel in call.kernels) for call in called]
    if device.type == "cpu":
        kernels = [call.cpu_time_total for call in called]
    return kernels, readings


def ways(
    product: Product, operands: tuple[Tensor, Tensor], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns microseconds of a product, timed in each way, and the clock right after each."""
    layout, m, n, k = product
    dtype = operands[0].dtype
    noise = functools.partial(calls.matmul, layout, dtype, m, n, k, device)
    sets = [operands, *(tuple(map(_copy, operands)) for _ in range(2))]
    turns = iter(range(1 << 60))

    def own() -> Callable[[], object]:
        return lambda: torch.mm(*sets[next(turns) % len(sets)])

    is_gpu = device.type == "cuda"
    times = (
        {"milliseconds": TIMED_MS, "warm_up_ms": WARM_UP_MS} if is_gpu else {"milliseconds": 1.0}
    )
    timed = functools.partial(time_of, device=device, **times)
    other = other_work(PASSES, device)
    tokens, width = (k, m) if layout == "tn" else (m, k)
    found: dict[str, float] = {}
    clocks: dict[str, float] = {}

    def note(way: str, us: float) -> None:
        found[way] = us
        clocks[f"{way} MHz"] = clock_and_power(device).get("MHz", 0.0)

    note("calibrate", timed(noise, other=other).us)
    note("profiled", profiled_turns(noise(), other, device))
    note("operands", timed(own, other=other).us)
    note("norm", timed(noise, other=norms(tokens, width, dtype, device)).us)
    note("busy", timed(noise, other=other, warm_up_ms=10 * WARM_UP_MS if is_gpu else 0.0).us)
    note("back", timed(noise, other=None).us)
    return found, clocks


def profiled_turns(
    call: Callable[[], object], other: OtherWork | None, device: torch.device
) -> float:
    """Returns the microseconds that the profiler gives for a product that alternates with other work."""
    alone_us = max(loop(call, device, 3), 1.0)
    turn = (other.call,) * max(1, round(alone_us / other.us)) if other else ()

    def run() -> None:
        for each in (*turn, call):
            each()

    repeats = max(5, min(200, round(WARM_UP_MS * 1e3 / (2 * alone_us))))
    us, _ = profiled_products(run, repeats, device)
    return statistics.median(us[len(us) // 2 :])


def measure(spec: StepSpec, device: torch.device, out: Path, *, alone: bool) -> None:
    in_step, operands, readings = time_in_steps(spec, device)
    sums: collections.Counter[str] = collections.Counter()
    for product, us in sorted(in_step.items(), key=lambda item: -sum(item[1])):
        times, clocks = ways(product, operands.pop(product), device) if alone else ({}, {})
        count = len(us)
        totals = {"step": sum(us), **{way: each * count for way, each in times.items()}}
        sums.update(totals)
        row = {
            "size": spec.size, "precision": spec.precision, "batch": spec.batch, "product": product,
            "count": count, "step_us": sum(us) / count, "calls_us": us, "step": readings, **times, **clocks,
            **environment(device), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        with (out / "products.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"  {product}: {count} x {sum(us) / count:.1f} us; {_ratios(totals)}", flush=True)
    name = f"{spec.size} {spec.precision}"
    print(f"{name}: {sums['step'] / 1e3:.2f} ms; {_ratios(sums)}", flush=True)


def _ratios(us: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {each / us['step']:.3f}" for way, each in us.items() if way != "step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="a small size, on a CPU")
    parser.add_argument("--only-steps", action="store_true", help="not the products alone")
    sizes = [spec[0] for spec in SPECS]
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if arguments.small else "cuda")
    for size, batch, tokens, precision in SPECS[:1] if arguments.small else SPECS:
        if size not in arguments.sizes:
            continue
        size, tokens = ("nano", 16) if arguments.small else (size, tokens)
        precision = "fp32" if arguments.small else precision
        spec = StepSpec(
            model=ModelSpec.preset(size, context_length=tokens), size=size, batch=batch,
            precision=precision, device=str(device),
            optimizer="fused" if precision == "bf16-master" else "adamw",
        )  # fmt: skip
        measure(spec, device, arguments.out, alone=not arguments.only_steps)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
