"""Measures the host time that data parallel wrappers add to a step. Nothing is sent between ranks.

    PYTHONPATH=src python benchmarks/bucket_host_time.py [OUT.jsonl]

The network is the Transformer of a preset with its widths divided by 64, so that a CPU spends
almost no time on arithmetic. The bucket size is divided by 4096, so that each bucket holds the same
parameters as at full width. A step is forward, backward, gradient synchronisation and AdamW. Fully
sharded modules cast their weights to 16 bits.

The wrappers take turns, one step each. Their times are CPU times of the thread. `added_us` is the
median over ROUNDS steps minus the median of the bare module, in µs; `added_us_by_least` is the same
for the minimum. Prints one JSON line per preset and wrapper, and appends it to OUT.jsonl.
"""

import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepgauge.measure.environment import environment
from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.parallel.data_parallel import DataParallel
from stepgauge.parallel.fsdp.call_order import CallOrder
from stepgauge.parallel.replicas import describe_parameter
from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.spec.model import ModelSpec

SHARDED = ("zero3", "torch-fsdp")
REPLICATING = ("none", "naive", "overlapped", "bucketed", "torch-ddp", "torch-ddp-views")
WRAPPERS = (*REPLICATING, "zero1", "zero2", *SHARDED)
RANKS, WIDTH_DIVISOR, BUCKET_MB = 2, 64, 25.0
TOKENS, ROUNDS, WARMUP = 4, 60, 10


def narrow(full: ModelSpec) -> ModelSpec:
    """Returns the network with its widths divided by WIDTH_DIVISOR and one head."""
    widths = {
        name: getattr(full, name) // WIDTH_DIVISOR for name in ("d_model", "d_ff", "vocab_size")
    }
    return ModelSpec.preset(
        "small", num_layers=full.num_layers, num_heads=1, context_length=TOKENS, **widths
    )


def require_same_plan(full: ModelSpec, wrapped: DataParallel) -> None:
    """Raises AssertionError if the narrow network has other buckets than the full one."""
    full_network = TransformerLM(full, device=torch.device("meta"))
    order = [describe_parameter(name, p) for name, p in full_network.named_parameters()]
    at_full_width = wrapped.policy.plan_buckets(order, bucket_mb=BUCKET_MB)
    assert [b.names for b in wrapped.buckets] == [b.names for b in at_full_width], (
        "the narrow network has other buckets than the full one"
    )


class InstantGroup(dist.ProcessGroup):
    """A process group whose collectives finish at once. torch's DistributedDataParallel needs it,
    because it rejects the empty futures of the fake group.
    """

    def __init__(self) -> None:
        super().__init__(0, RANKS)  # type: ignore[call-arg]
        self.messages = 0

    def allreduce(self, tensors: list[torch.Tensor], _: Any) -> dist.Work:
        self.messages += 1
        return _finished_work(tensors)

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> dist.Work:
        return _finished_work(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: Any
    ) -> dist.Work:
        for own, gathered in zip(inputs, outputs, strict=True):
            for part in gathered:
                part.copy_(own)
        return _finished_work(outputs)


def _finished_work(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class TimedWrapper:
    """A wrapped module and the times of its steps, in µs."""

    def __init__(self, wrapper: str, full: ModelSpec):
        torch.manual_seed(0)
        self.group = InstantGroup() if wrapper.startswith("torch-ddp") else None
        self.parallel = parallelise(
            wrapper,
            TransformerLM(narrow(full)),
            lambda module: module.parameters(),
            functools.partial(torch.optim.AdamW, lr=0.0, foreach=True),
            settings=Settings(
                bucket_mb=BUCKET_MB / WIDTH_DIVISOR**2,
                group=self.group,
                compute_dtype=torch.bfloat16 if wrapper in SHARDED else None,
            ),
        )
        self.times: list[float] = []

    def step(self) -> None:
        tokens_BT = torch.zeros(1, TOKENS, dtype=torch.long)
        self.parallel.optimizer.zero_grad()
        if self.group:
            self.group.messages = 0
        start = time.thread_time()
        self.parallel.module(tokens_BT, tokens_BT).backward()
        self.parallel.optimizer.step()
        self.times.append((time.thread_time() - start) * 1e6)

    def messages(self) -> int:
        return (
            self.group.messages if self.group else len(getattr(self.parallel.module, "buckets", ()))
        )

    def packed(self) -> int | None:
        """Returns how many gradients share a bucket with others. None for torch's DDP, which copies
        every gradient into a bucket.
        """
        counts = [len(bucket.names) for bucket in getattr(self.parallel.module, "buckets", ())]
        return None if self.group else sum(count for count in counts if count > 1)


def rows(size: str) -> Iterator[dict[str, Any]]:
    """Times all wrappers of one preset and yields a row for each."""
    full = ModelSpec.preset(size)
    timed = {wrapper: TimedWrapper(wrapper, full) for wrapper in WRAPPERS}
    require_same_plan(full, timed["bucketed"].parallel.module)
    gc.disable()
    for _ in range(WARMUP + ROUNDS):
        for each in timed.values():
            each.step()
        gc.collect(0)
    bare = timed["none"].times[WARMUP:]
    for wrapper, each in timed.items():
        times = each.times[WARMUP:]
        yield {
            "kind": "wrapper-host-time",
            "size": size,
            "wrapper": wrapper,
            "median_us": statistics.median(times),
            "added_us": statistics.median(times) - statistics.median(bare),
            "added_us_by_least": min(times) - min(bare),
            "messages": each.messages(),
            "packed": each.packed(),
        }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    # As with NCCL, whose collective divides by the number of ranks. (torch's DDP divides while it
    # copies gradients into buckets.)
    GradientReducer.is_nccl = lambda *_: True
    # The first forward compares the order of calls between ranks. Here there is only one rank.
    CallOrder.require_same = lambda *_: None
    CallOrder.__init__ = lambda *_: None
    for size in ("small", "large"):
        for row in rows(size):
            row["environment"] = environment(torch.device("cpu"))
            print(json.dumps({k: v for k, v in row.items() if k != "environment"}))
            for path in sys.argv[1:]:
                with Path(path).open("a") as file:
                    print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
