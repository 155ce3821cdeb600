"""Times a matrix product after warm-ups of different lengths, each from an idle GPU.

    python benchmarks/sustained_clock.py OUT            # about 15 s on a GPU
    python benchmarks/sustained_clock.py OUT --small    # on a CPU, to check that it runs

A GPU at its power limit lowers its clock for seconds, as it gets warmer. This shows after how long a
product takes what it takes in a long run, and so how long stepgauge calibrate has to warm up. Appends a JSON
line per warm-up to OUT/sustained_clock.jsonl.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import torch

from stepgauge.calibrate import calls
from stepgauge.calibrate.operations import PASSES, other_work
from stepgauge.calibrate.timing import clock_and_power, time_of
from stepgauge.measure.environment import environment

WARM_UPS_MS = (3.0, 30.0, 100.0, 300.0, 1000.0, 2000.0, 5000.0)
TIMED_MS, IDLE_S = 30.0, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if arguments.small else "cuda")
    size = 128 if arguments.small else 4096
    make = functools.partial(
        calls.matmul, "nt", torch.float32 if arguments.small else torch.bfloat16, size, size, size,
        device,
    )  # fmt: skip
    other = other_work(PASSES, device)
    for warm_up_ms in WARM_UPS_MS[: 2 if arguments.small else None]:
        time.sleep(0.0 if arguments.small else IDLE_S)
        us = time_of(make, device, TIMED_MS, other, warm_up_ms=warm_up_ms).us
        row = {"warm_up_ms": warm_up_ms, "us": us, "size": size, **clock_and_power(device)}
        print(row, flush=True)
        with (arguments.out / "sustained_clock.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **environment(device)}) + "\n")


if __name__ == "__main__":
    main()
