"""Measures how much products of several shapes and collectives slow each other down.

    python benchmarks/contention_shapes.py OUT            # all GPUs, about 2 s per row
    python benchmarks/contention_shapes.py OUT --memory usual registered symmetric --products 4096
    python benchmarks/contention_shapes.py OUT --small    # on a CPU, to check that it runs

`stepgauge calibrate` does this for one shape of each class of kernels; this shows how much the slowdown
depends on the shape, and so how to choose classes and shapes. --memory tells where the messages lie: in
memory of which NCCL knows nothing, or that is registered with it, or symmetric, which kernels of other ranks
read and write directly. Writes OUT/contention_shapes.jsonl: a line per
product and collective, with medians over rounds and ranks.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.calibrate import contention
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.calibration import ContentionSpec
from stepgauge.spec.comm import CommSpec

# Layout, and rows, columns and inner dimension: the products of several networks, by time.
PRODUCTS = [
    ("nt", (4096, 2560, 2560)),
    ("nn", (4096, 2560, 6912)),
    ("tn", (2560, 6912, 4096)),
    ("nt", (4096, 4096, 4096)),
    ("nt", (4096, 13824, 2560)),
    ("tn", (13824, 2560, 4096)),
    ("nn", (8192, 4096, 4096)),
    ("nn", (4096, 2560, 13824)),
    ("nt", (8192, 8192, 4096)),
    ("tn", (22016, 4096, 8192)),
]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SMALL = [("nt", (512, 256, 512))]
MESSAGE_BYTES = 2**27
MEMORIES = USUAL, REGISTERED, SYMMETRIC = ("usual", "registered", "symmetric")


def put_messages_in(memory: str, device: torch.device) -> None:
    """From now on messages lie in memory that NCCL knows."""
    dist.all_reduce(torch.zeros(1, device=device))  # creates the communicator
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=memory == SYMMETRIC)
    usual = contention.collective_of

    def collective_of(spec: CommSpec, device: torch.device) -> Any:
        with torch.cuda.use_mem_pool(pool):
            return usual(spec, device)

    contention.collective_of = collective_of


def measure(path: str, ranks: int, small: bool, memory: str, width: int) -> None:
    """Runs on every rank. Rank 0 writes a line as soon as it is measured."""
    torch.set_num_threads(1)
    device = "cpu" if small else "cuda"
    dtype = "fp32" if small else "bf16"
    products = SMALL if small else [p for p in PRODUCTS if width in (0, p[1][1])]
    if memory != USUAL and not small:
        put_messages_in(memory, torch.device(device, torch.cuda.current_device()))
    for collective in COLLECTIVES[:1] if small else COLLECTIVES:
        for layout, sizes in products:
            contention.KERNELS[device]["matmul"] = (f"matmul {layout} {dtype}", sizes)
            spec = ContentionSpec(
                kernels="matmul", collective=collective, ranks=ranks, device=device,
                size_bytes=2**20 if small else MESSAGE_BYTES, milliseconds=20.0,
            )  # fmt: skip
            rounds: list[list[contention.Times]] = [[]] * ranks
            dist.all_gather_object(rounds, contention.measure(spec))
            if dist.get_rank() == 0:
                times = [each for own in rounds for each in own]
                row = {"ranks": ranks, "collective": collective, "memory": memory}
                row |= {"layout": layout, "sizes": sizes}
                row |= medians(times, math.prod(sizes))
                with Path(path).open("a") as file:
                    file.write(json.dumps({**row, "torch": torch.__version__}) + "\n")
                print(row, flush=True)


def medians(rounds: list[contention.Times], product: int) -> dict[str, float]:
    kernel_us = statistics.median(each.kernel for each in rounds)
    return {
        "kernel_us": kernel_us,
        "tflops": 2 * product / kernel_us / 1e6,
        "collective_us": statistics.median(each.collective for each in rounds),
        "kernel_slowdown": statistics.median(each.kernel_beside / each.kernel for each in rounds),
        "collective_slowdown": statistics.median(
            each.collective_beside / each.collective for each in rounds
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", help="[all GPUs]")
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=[USUAL])
    parser.add_argument(
        "--products", type=int, default=0, metavar="WIDTH", help="only of this width"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "contention_shapes.jsonl"
    for ranks in given.ranks or [2 if given.small else torch.cuda.device_count()]:
        device = "cpu" if given.small else "cuda"
        for memory in given.memory:
            about = str(path), ranks, given.small, memory, given.products
            try:
                launch(measure, *about, ranks=ranks, device=device)
            except RankError as error:  # measure the others all the same
                print(memory, error, flush=True)


if __name__ == "__main__":
    main()
