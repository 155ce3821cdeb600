"""Checks and times single tensor parallel linear layers whose collectives overlap with the product.

    python benchmarks/overlapped_layers.py          # on 2 or 4 GPUs of one machine, about 30 s
    python benchmarks/overlapped_layers.py --small  # on a CPU, to check that it runs and is correct

It answers three questions: is the overlapped form correct, is it free of races, and from how many
tokens on is it faster? Output and gradients of each layer are compared with one process in float32.
Then steps are repeated while ranks are delayed at random; all repetitions must give the same.

Appends a JSON line per row to $OUT/overlapped_layers.jsonl (the current folder if OUT is not set):
ms of forward and backward of the slowest rank, and the host's part of it, with collectives before
or after the product (`plain`) and at the same time (`overlapped`). A hang ends the run after 40 s
and prints where each rank was.
"""

import faulthandler
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.kernels.part_sum import part_sum
from stepgauge.measure.timing import time_phases
from stepgauge.parallel.tensor_parallel import TensorParallel, parallelize_tensor
from stepgauge.runtime.launch import launch
from stepgauge.spec.plan import tensor as plan
from stepgauge.spec.plan.tensor import Rule

HANG_S = 40
# Relative error of ranks in the dtype that is timed, compared with one process in float32. bf16 rounds
# to 2^-9.
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Linear layers of a block with width 4096: rule, input features, output features.
LAYERS = {
    "qkv": ("column", 4096, 12288),
    "gate_up": ("column", 4096, 22016),
    "output": ("row", 4096, 4096),
    "down": ("row", 11008, 4096),
}
FORMS = ("plain", "overlapped")
STEPS_PER_WAIT = (
    5  # the host launches several steps before it waits, so that it does not limit them
)


class Layer(nn.Module):
    """A module with one linear layer, which is split over ranks."""

    def __init__(self, name: str, scale: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.rule, inputs, outputs = LAYERS[name]
        with device:
            torch.manual_seed(0)
            self.layer = nn.Linear(inputs // scale, outputs // scale, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Run:
    """A layer in one form, with this rank's part of one input and one upstream gradient."""

    def __init__(self, name: str, form: str, tokens: int, scale: int, device: torch.device):
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.unsplit = Layer(name, scale, device, dtype)
        own = Layer(name, scale, device, dtype)
        table = {"layer": Rule(own.rule)}
        self.parallel: TensorParallel = parallelize_tensor(
            own, table, by_sequence=True, overlap=form != "plain", part_sum=part_sum
        )
        generator = torch.Generator(device).manual_seed(tokens)
        batch, weight = 1 if scale == 1 else 2, self.unsplit.layer.weight
        shape = (batch, tokens, weight.shape[1])
        self.whole_x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        shape = (batch, tokens, weight.shape[0])
        self.whole_dy = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self.x = self.part(self.whole_x, own.rule == "column").requires_grad_()
        self.dy = self.part(self.whole_dy, own.rule == "row")

    def part(self, x: Tensor, by_sequence: bool) -> Tensor:
        """Returns this rank's part of the sequence, or of the features."""
        return x.chunk(self.ranks, 1 if by_sequence else 2)[self.rank].contiguous()

    def step(self) -> list[Tensor]:
        """Runs forward and backward. Returns the output and the gradients of input and weight."""
        weight = self.parallel.module.layer.weight
        self.x.grad = weight.grad = None
        y = self.parallel.module(self.x)
        y.backward(self.dy)
        return [y.detach(), self.x.grad, weight.grad]

    def error(self) -> float:
        """Returns the largest relative error of `step`, compared with one process in float32."""
        x = self.whole_x.float().requires_grad_()
        layer = self.unsplit.float()
        y = layer(x)
        y.backward(self.whole_dy.float())
        by_column = self.unsplit.rule == "column"
        expected = [
            self.part(y.detach(), not by_column),
            self.part(x.grad, by_column),
            self.parallel.part("layer.weight", layer.layer.weight.grad),
        ]
        pairs = zip(self.step(), expected, strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    def difference(self, times: int, device: torch.device) -> float:
        """Repeats `step` while ranks are delayed at random. Returns the largest relative difference
        from the first result.
        """
        first, delays, largest = self.step(), random.Random(self.rank), 0.0
        for _ in range(times):
            if device.type == "cuda":
                torch.cuda._sleep(delays.choice((0, 0, 100_000, 1_000_000)))
            pairs = zip(self.step(), first, strict=True)
            largest = max(largest, *(((a - b).norm() / b.norm()).item() for a, b in pairs))
        return largest


def check(scale: int, tokens: int, times: int, device: torch.device) -> list[dict[str, object]]:
    """Returns the errors of all layers. Raises AssertionError if one is too large."""
    rows = []
    for name in LAYERS:
        for form in FORMS:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            run = Run(name, form, tokens, scale, device)
            error = run.error()
            row = {"layer": name, "form": form, "tokens": tokens, "error": error}
            if form != "plain":
                row["repetitions_differ_by"] = run.difference(times, device)
            if max(error, row.get("repetitions_differ_by", 0.0)) > LARGEST_ERROR[run.x.dtype]:
                raise AssertionError(f"wrong: {row}")
            rows.append(row)
    return rows


def measure(small: bool) -> list[dict[str, object]]:
    """Runs on each rank: checks all layers, then times them. Returns a row for each."""
    torch.set_num_threads(1)
    plan.LEAST_OVERLAPPED_BYTES = 0  # overlap all sizes, to see from which on it is faster
    device = torch.device("cpu" if small else f"cuda:{torch.cuda.current_device()}")
    rows = check(64 if small else 1, 16 if small else 2048, 3 if small else 40, device)
    for tokens in (16,) if small else (512, 1024, 2048, 4096, 8192):
        for name in LAYERS:
            for form in FORMS:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                run = Run(name, form, tokens, 64 if small else 1, device)
                host_ms: list[float] = []

                def run_steps(run: Run = run, host_ms: list[float] = host_ms) -> None:
                    begin = time.perf_counter()
                    for _ in range(STEPS_PER_WAIT):
                        run.step()
                    host_ms.append((time.perf_counter() - begin) * 1e3)

                steps = 2 if small else 10
                own = time_phases({"several": run_steps}, device, warmup=2, steps=steps)["step"]
                row = {"layer": name, "form": form, "tokens": tokens}
                row |= {
                    "ms": slowest(own) / STEPS_PER_WAIT,
                    "host_ms": slowest(host_ms) / STEPS_PER_WAIT,
                }
                rows.append(row)
    faulthandler.cancel_dump_traceback_later()
    return rows


def slowest(own: list[float]) -> float:
    """Returns the median over steps of the slowest rank's ms."""
    by_rank: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, own)
    return statistics.median(max(step) for step in zip(*by_rank, strict=True))


def main() -> None:
    small = "--small" in sys.argv
    device, max_ranks = ("cpu", 2) if small else ("cuda", torch.cuda.device_count())
    path = Path(os.environ.get("OUT", ".")) / "overlapped_layers.jsonl"
    with path.open("a") as file:
        for ranks in [n for n in (2, 4) if n <= max_ranks]:
            for row in launch(measure, small, ranks=ranks, device=device)[0]:
                row = {"ranks": ranks, "torch": torch.__version__, **row}
                file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
