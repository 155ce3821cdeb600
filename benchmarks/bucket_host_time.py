"""What data parallel wrappers add to a step's time on the host, in µs, with a process group that
does nothing.

    PYTHONPATH=src python benchmarks/bucket_host_time.py [OUT.jsonl]

The Transformer of a preset, so narrow that a CPU computes next to nothing: widths a 64th, buckets a
4096th, so that what travels together is what does at full width. A step is forward, backward,
synchronisation and AdamW; fully sharded modules cast their weights to 16 bits. The wrappers take
turns; of each the median and the least thread time of ROUNDS steps count, less those of the bare
module. One JSON line a preset and wrapper, printed and added to OUT.
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
RANKS, NARROWER, BUCKET_MB = 2, 64, 25.0
TOKENS, ROUNDS, WARMUP = 4, 60, 10


def narrow(full: ModelSpec) -> ModelSpec:
    widths = {name: getattr(full, name) // NARROWER for name in ("d_model", "d_ff", "vocab_size")}
    return ModelSpec.preset(
        "small", num_layers=full.num_layers, num_heads=1, context_length=TOKENS, **widths
    )


def require_same_plan(full: ModelSpec, ours: DataParallel) -> None:
    whole = TransformerLM(full, device=torch.device("meta"))
    order = [describe_parameter(name, p) for name, p in whole.named_parameters()]
    at_full_width = ours.policy.plan_buckets(order, bucket_mb=BUCKET_MB)
    assert [b.names for b in ours.buckets] == [b.names for b in at_full_width], (
        "narrowed, it is packed otherwise"
    )


class Answering(dist.ProcessGroup):
    """For torch's DistributedDataParallel: the futures of the fake group are empty, which it does
    not take.
    """

    def __init__(self) -> None:
        super().__init__(0, RANKS)  # type: ignore[call-arg]
        self.messages = 0

    def allreduce(self, tensors: list[torch.Tensor], _: Any) -> dist.Work:
        self.messages += 1
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> dist.Work:
        return _done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: Any
    ) -> dist.Work:
        for ours, everyones in zip(inputs, outputs, strict=True):
            for theirs in everyones:
                theirs.copy_(ours)
        return _done(outputs)


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Contender:
    """A wrapped module, and the µs of its steps."""

    def __init__(self, wrapper: str, full: ModelSpec):
        torch.manual_seed(0)
        self.group = Answering() if wrapper.startswith("torch-ddp") else None
        self.parallel = parallelise(
            wrapper,
            TransformerLM(narrow(full)),
            lambda module: module.parameters(),
            functools.partial(torch.optim.AdamW, lr=0.0, foreach=True),
            settings=Settings(
                bucket_mb=BUCKET_MB / NARROWER**2,
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
        """Gradients that travel with others; torch's are all copied."""
        counts = [len(bucket.names) for bucket in getattr(self.parallel.module, "buckets", ())]
        return None if self.group else sum(count for count in counts if count > 1)


def rows(size: str) -> Iterator[dict[str, Any]]:
    full = ModelSpec.preset(size)
    contenders = {wrapper: Contender(wrapper, full) for wrapper in WRAPPERS}
    require_same_plan(full, contenders["bucketed"].parallel.module)
    gc.disable()
    for _ in range(WARMUP + ROUNDS):
        for contender in contenders.values():
            contender.step()
        gc.collect(0)
    bare = contenders["none"].times[WARMUP:]
    for wrapper, contender in contenders.items():
        times = contender.times[WARMUP:]
        yield {
            "kind": "wrapper-host-time",
            "size": size,
            "wrapper": wrapper,
            "median_us": statistics.median(times),
            "added_us": statistics.median(times) - statistics.median(bare),
            "added_us_by_least": min(times) - min(bare),
            "messages": contender.messages(),
            "packed": contender.packed(),
        }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    # As over NCCL, which divides within the collective. (torch's divides while it packs.)
    GradientReducer.is_nccl = lambda *_: True
    # Of the first forward: the other rank says nothing.
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
