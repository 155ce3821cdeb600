"""Compares matrix products inside a training step with the same products timed by themselves.

    python benchmarks/products_in_steps.py OUT                # about 90 s on a GPU
    python benchmarks/products_in_steps.py OUT --small        # on a CPU, to check that it runs

An eager step runs with an event before and after each product, and keeps the operands of the first of each
shape. Then each shape is timed in several ways, of which "calibrate" is the one of stepgauge calibrate:

  calibrate   noise as operands, alternating with a pass over 256 MiB
  operands    the step's operands, alternating with the same pass
  norm        noise, alternating with RMSNorms of the step's tokens
  busy        noise, with the pass, after a warm-up of a second instead of 0.1 s
  back        noise, back to back

Appends a JSON line per shape to OUT/products.jsonl, and prints the time of all products of a step in each
way relative to their time in the step. Shapes are m, n, k and the layout: nt is a linear layer's forward, nn
its input gradient, tn its weight gradient.
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
from stepgauge.calibrate.timing import OtherWork, loop, time_of
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


class Mark:
    """A point of the device's work; on a CPU, which works at once, of the time."""

    def __init__(self, device: torch.device):
        self.event = torch.Event(device, enable_timing=True) if device.type == "cuda" else None
        self.seconds = time.perf_counter()
        if self.event:
            self.event.record()

    def us_since(self, before: "Mark") -> float:
        if self.event and before.event:
            return 1e3 * before.event.elapsed_time(self.event)
        return 1e6 * (self.seconds - before.seconds)


class Products(TorchDispatchMode):
    """Records the time of each product, and the operands of the first of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[Product, Mark, Mark]] = []
        self.operands: dict[Product, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten.addmm):
            return function(*args, **(kwargs or {}))
        left, right = args[-2:]
        product = _layout(left, right), left.shape[0], right.shape[1], left.shape[1]
        if product not in self.operands:
            self.operands[product] = _copy(left), _copy(right)
        before = Mark(left.device)
        result = function(*args, **(kwargs or {}))
        self.spans.append((product, before, Mark(left.device)))
        return result

    def us(self) -> dict[Product, list[float]]:
        """Returns the microseconds of each product so far, by shape, and forgets them."""
        times = collections.defaultdict(list)
        for product, before, after in self.spans:
            times[product].append(after.us_since(before))
        self.spans.clear()
        return times


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
) -> tuple[dict[Product, list[float]], dict[Product, tuple[Tensor, Tensor]]]:
    """Returns the microseconds of each product of a step, with one value for each of its calls (the median
    over steps), and its operands.
    """
    step, batch = build(spec, device)
    phases, products = step.phases(batch), Products()
    steps = []
    with step.precision.matmul_mode():
        for _ in range(WARM_UP + STEPS):
            with products:
                for phase in phases.values():
                    phase()
            devices.synchronize(device)
            steps.append(products.us())
    timed = steps[WARM_UP:]
    medians = {
        product: [statistics.median(us) for us in zip(*(s[product] for s in timed), strict=True)]
        for product in timed[0]
    }
    return medians, products.operands


def ways(
    product: Product, operands: tuple[Tensor, Tensor], device: torch.device
) -> dict[str, float]:
    """Returns microseconds of a product, timed in each way."""
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
    return {
        "calibrate": timed(noise, other=other).us,
        "operands": timed(own, other=other).us,
        "norm": timed(noise, other=norms(tokens, width, dtype, device)).us,
        "busy": timed(noise, other=other, warm_up_ms=10 * WARM_UP_MS if is_gpu else 0.0).us,
        "back": timed(noise, other=None).us,
    }


def measure(spec: StepSpec, device: torch.device, out: Path) -> None:
    in_step, operands = time_in_steps(spec, device)
    sums: collections.Counter[str] = collections.Counter()
    for product, us in sorted(in_step.items(), key=lambda item: -sum(item[1])):
        times, count = ways(product, operands.pop(product), device), len(us)
        totals = {"step": sum(us), **{way: each * count for way, each in times.items()}}
        sums.update(totals)
        row = {
            "size": spec.size, "precision": spec.precision, "batch": spec.batch, "product": product,
            "count": count, "step_us": sum(us) / count, **times, **environment(device),
            "date": time.strftime("%Y-%m-%d"),
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
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if arguments.small else "cuda")
    for size, batch, tokens, precision in SPECS[:1] if arguments.small else SPECS:
        size, tokens = ("nano", 16) if arguments.small else (size, tokens)
        model = ModelSpec.preset(size, context_length=tokens)
        precision = "fp32" if arguments.small else precision
        spec = StepSpec(
            model=model, size=size, batch=batch, precision=precision, device=str(device)
        )
        measure(spec, device, arguments.out)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
