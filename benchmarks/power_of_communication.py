"""Times products that run alone while a collective runs before and after them.

    python benchmarks/power_of_communication.py OUT            # on two GPUs, about 50 s
    python benchmarks/power_of_communication.py OUT --trial    # on a CPU, to check that it runs

A GPU at its power limit lowers its clock, and a collective needs power, too. So does it slow down products
that run at another time? Rounds of 30 ms have a quiet part, in which products alternate with passes over
memory, and a loud part, in which they do so beside all-reduces (NCCL) or beside copies to the other GPU
(copy engines). The quiet part's time is compared with that of rounds without a loud part.

Appends a line per setting to OUT/power.jsonl: `share`, the products' share of the quiet time; `loud`, the
fraction of the round that is loud; `beside`; `us` per product and pass in the quiet part, with the
clock and power that the driver shows; and `longer`, relative to the mean of the quiet rounds before and
after it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from versions import versions

from stepgauge.calibrate.timing import clock_and_power
from stepgauge.measure import devices
from stepgauge.runtime.launch import launch
from stepgauge.runtime.world import gathered_objects, joined_world

ROUND_MS, WARM_UP_S, TIMED_S = 30.0, 0.8, 1.2
ROUNDS_PER_WAIT = 4  # the host launches so far ahead
SHARES, LOUD = (0.5, 0.7, 0.9), (0.05, 0.1, 0.2, 0.4)


class Rounds:
    """A round of products and passes on this rank, of which a part runs beside communication."""

    def __init__(self, device: torch.device, share: float, trial: bool):
        self.device = device
        n, numel = (256, 2**16) if trial else (8192, 2**27)
        dtype = torch.float32 if trial else torch.bfloat16
        self.a, self.b = (torch.randn(n, n // 2, device=device, dtype=dtype) for _ in range(2))
        self.out = torch.empty(n, n, device=device, dtype=dtype)
        self.x = torch.randn(numel, device=device)
        self.message = torch.zeros(numel // 8, device=device)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        product, whole = self.ms_of(self.product), self.ms_of(lambda: self.pass_over(1.0))
        self.part = min(1.0, product * (1 - share) / share / whole)
        # the same on both ranks, because it decides how many messages a round has
        self.pair_ms = statistics.fmean(gathered_objects(product + self.part * whole))
        self.receiver: torch.Tensor | None = None

    def product(self) -> None:
        torch.mm(self.a, self.b.t(), out=self.out)

    def pass_over(self, part: float) -> None:
        self.x[: int(self.x.numel() * part)].mul_(1.0)

    def ms_of(self, call: Callable[[], None]) -> float:
        call()
        devices.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(20):
            call()
        devices.synchronize(self.device)
        return (time.perf_counter() - start) / 20 * 1e3

    def pairs(self, count: int) -> None:
        for _ in range(count):
            self.product()
            self.pass_over(self.part)

    def communicate(self, beside: str) -> None:
        if beside == "all_reduce":
            dist.all_reduce(self.message)
        elif self.receiver is not None:
            self.receiver.copy_(self.message, non_blocking=True)

    def round(self, loud: float, beside: str) -> tuple[int, Callable[[], float]]:
        """Runs a round. Returns the number of pairs of its quiet part, and what tells its µs later."""
        quiet = max(1, round(ROUND_MS * (1 - loud) / self.pair_ms))
        marks = [self.mark()]
        self.pairs(quiet)
        marks.append(self.mark())
        if loud:
            self.loud_part(max(1, round(ROUND_MS * loud / self.pair_ms)), beside)
        if self.side is None:
            return quiet, lambda: (marks[1] - marks[0]) * 1e6
        return quiet, lambda: marks[0].elapsed_time(marks[1]) * 1e3

    def mark(self) -> Any:
        """Returns this moment on the device: an event, or the time in seconds."""
        if self.side is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def loud_part(self, pairs: int, beside: str) -> None:
        """Computes while it communicates, for about as long."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # None changes nothing
            for _ in range(3 * pairs):
                self.communicate(beside)
        self.pairs(pairs)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def timed(self, loud: float, beside: str, rounds: int) -> float:
        """Returns the median µs of a product and a pass in the quiet parts."""
        found = []
        for number in range(1, rounds + 1):
            found.append(self.round(loud, beside))
            if number % ROUNDS_PER_WAIT == 0:
                devices.synchronize(self.device)
        devices.synchronize(self.device)
        return statistics.median(us() / pairs for pairs, us in found)


def measure(trial: bool) -> list[dict[str, object]]:
    """Runs on each rank. Returns its rows."""
    world = joined_world()
    assert world is not None
    device = world.device("cpu" if trial else "cuda")
    warm, timed = (1, 2) if trial else (int(s * 1e3 / ROUND_MS) for s in (WARM_UP_S, TIMED_S))
    rows = []
    for share in SHARES[:1] if trial else SHARES:
        rounds = Rounds(device, share, trial)
        if device.type == "cuda":
            rounds.receiver = torch.empty_like(rounds.message, device=f"cuda:{1 - world.rank}")
        own = []
        settings = [(0.0, "")]
        for beside in ("all_reduce", "copy"):
            for loud in LOUD[:1] if trial else LOUD:
                settings += [(loud, beside), (0.0, "")]
        for loud, beside in settings:
            dist.barrier()
            rounds.timed(loud, beside, warm)
            us = rounds.timed(loud, beside, timed)
            state = clock_and_power(device)
            own.append({"share": share, "loud": loud, "beside": beside, "us": us, **state})
        for before, row, after in zip(own, own[1:], own[2:], strict=False):
            if row["loud"]:
                row["longer"] = 2 * row["us"] / (before["us"] + after["us"]) - 1
        rows += own
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--trial", action="store_true", help="small, in two processes of a CPU")
    arguments = parser.parse_args()
    if not arguments.trial and torch.cuda.device_count() < 2:
        parser.error("this needs two GPUs; --trial runs it small on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    ranks = launch(measure, arguments.trial, ranks=2, device="cpu" if arguments.trial else "cuda")
    with (arguments.out / "power.jsonl").open("a") as lines:
        for rank, rows in enumerate(ranks):
            for row in rows:
                lines.write(
                    json.dumps({"rank": rank, **row} | versions(trial=arguments.trial)) + "\n"
                )
                if "longer" in row:
                    print(rank, row)


if __name__ == "__main__":
    main()
