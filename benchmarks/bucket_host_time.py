"""What launching a bucket of gradients costs the host, in µs, with a process group that does nothing.

    PYTHONPATH=src python benchmarks/bucket_host_time.py [OUT.jsonl]

216 gradients of 8 × 8, backward and synchronisation on a CPU: the least of 35 steps of each plan, less that of the plan
with all gradients in one bucket, over how many buckets more there are. One JSON line, printed and added to OUT.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepgauge.measure.environment import environment
from stepgauge.parallel.data_parallel import BucketedDataParallel

GRADIENTS, EACH_MB = 216, 8 * 8 * 4e-6


def least_ms(gradients_a_bucket: int) -> tuple[float, int]:
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(GRADIENTS)])
    wrapped = BucketedDataParallel(module, bucket_mb=EACH_MB * gradients_a_bucket)
    x, times = torch.ones(4, 8), []
    for _ in range(40):
        module.zero_grad()
        loss = wrapped(x).sum()
        start = time.perf_counter()
        loss.backward()
        wrapped.finish_gradient_synchronization()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times[5:]), len(wrapped.buckets)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    (alone, some), (of_one, singles), (of_four, fours) = (least_ms(count) for count in (GRADIENTS, 1, 4))
    row = {
        "kind": "bucket-host-time",
        "us_a_bucket_of_one": (of_one - alone) / (singles - some) * 1e3,
        "us_a_bucket_of_four": (of_four - alone) / (fours - some) * 1e3,
        "environment": environment(torch.device("cpu")),
    }
    print(json.dumps(row))
    for path in sys.argv[1:]:
        with Path(path).open("a") as file:
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
