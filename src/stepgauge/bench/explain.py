"""Runs collectives on small tensors between real processes and writes down what each rank sees."""

import time

import torch
import torch.distributed as dist

from stepgauge.measure.collectives import Collective
from stepgauge.measure.ring import Ring
from stepgauge.runtime.launch import launch
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.comm import OPS, ROOT, CommSpec
from stepgauge.spec.explain import (
    RING,
    Explained,
    RingStep,
    Seen,
    Values,
    names_of,
)

LATE_S = 0.05  # rank r comes r times this late to the barrier

_RING_SUMMARY = "The sum over all ranks comes to every rank, by sends to the next rank only."


def explain(op: str, *, ranks: int) -> list[Explained]:
    """The operation as it ran, all of them for "all". Raises ValueError as names_of does."""
    names = names_of(op, ranks=ranks)
    return [
        _put_together(name, ranks, seen)
        for name, seen in launch(_see, names, ranks=ranks, backend="gloo")[0]
    ]


def _see(names: list[str]) -> list[tuple[str, list[tuple[Seen, list[tuple[str, list[Values]]]]]]]:
    """On each rank: what it sees of each operation, and of all its peers."""
    found = []
    for name in names:
        mine = _see_ring() if name == RING else (_see_one(name), [])
        found.append((name, gathered_objects(mine)))
    return found


def _see_one(op: str) -> Seen:
    """Rank r gives 10r, 10r + 1, ...: each value says where it comes from."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collective = Collective(
        CommSpec(op=op, ranks=size, size_bytes=4 * size, dtype="int32"), torch.device("cpu")
    )
    values = torch.arange(collective.given.numel(), dtype=torch.int32) + 10 * rank
    collective.got.zero_()
    collective.given.copy_(values)
    empty = op in ("broadcast", "scatter") and rank != ROOT
    if op == "broadcast" and rank != ROOT:
        collective.given.zero_()
    before: Values = [] if empty else _written(collective.given)
    dist.barrier()
    if op == "barrier":
        time.sleep(LATE_S * rank)
    start = time.perf_counter()
    collective.run()
    wait_ms = (time.perf_counter() - start) * 1e3
    nothing = op in ("reduce", "gather") and rank != ROOT  # what is left there is not defined
    return Seen(before, [] if nothing else _written(collective.got), wait_ms)


def _see_ring() -> tuple[Seen, list[tuple[str, list[Values]]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(size, dtype=torch.int32) + 10 * rank
    before, steps = _written(tensor), []
    ring = Ring()
    start = time.perf_counter()
    ring.all_reduce(
        tensor,
        watch=lambda name, chunks: steps.append((name, [_written(chunk) for chunk in chunks])),
    )
    return Seen(before, _written(tensor), (time.perf_counter() - start) * 1e3), steps


def _written(tensor: torch.Tensor) -> Values:
    return [str(value) for value in tensor.tolist()]


def _put_together(
    name: str, n: int, everyone: list[tuple[Seen, list[tuple[str, list[Values]]]]]
) -> Explained:
    seen = [mine for mine, _ in everyone]
    if name == RING:
        remark = f"{2 * (n - 1)} steps; each rank sends 2·({n} − 1)·K/{n} of K bytes, whatever the number of ranks."
        steps = [_ring_step(index, [theirs[index] for _, theirs in everyone])
                 for index in range(2 * (n - 1))]  # fmt: skip
        return Explained("ring all-reduce", _RING_SUMMARY, seen, steps, remark)
    remark = (
        f"Rank r came {1e3 * LATE_S:.0f}·r ms late: the first waits longest."
        if name == "barrier"
        else ""
    )
    return Explained(name, OPS[name].summary, seen, remark=remark)


def _ring_step(index: int, ranks: list[tuple[str, list[Values]]]) -> RingStep:
    """The step of that number as each rank saw it; one chunk goes from each to the next."""
    n, name = len(ranks), ranks[0][0]
    back = index % (n - 1) + (1 if name.startswith("reduce-scatter") else 0)
    sends = [f"chunk {(r - back) % n} → rank {(r + 1) % n}" for r in range(n)]
    return RingStep(name, sends, [[" ".join(chunk) for chunk in chunks] for _, chunks in ranks])
