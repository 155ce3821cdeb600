"""Runs collectives on small tensors between real processes and records what each rank sees."""

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

LATE_S = 0.05  # rank r arrives r times this late at the barrier

_RING_SUMMARY = "The sum over all ranks comes to every rank, by sends to the next rank only."
View = tuple[Seen, list[tuple[str, list[Values]]]]  # a rank's result, and its steps in a ring


def explain(op: str, *, ranks: int) -> list[Explained]:
    """Runs the collective, or all of them for "all", and returns what each rank saw. Raises ValueError
    as names_of does.
    """
    names = names_of(op, ranks=ranks)
    views = launch(_run_all, names, ranks=ranks, backend="gloo")[0]
    return [_explained(name, ranks, views_of_ranks) for name, views_of_ranks in views]


def _run_all(names: list[str]) -> list[tuple[str, list[View]]]:
    """Runs the collectives on this rank and returns the views of all ranks, by name."""
    views = []
    for name in names:
        own = _run_ring() if name == RING else (_run_collective(name), [])
        views.append((name, gathered_objects(own)))
    return views


def _run_collective(op: str) -> Seen:
    """Runs the collective with inputs 10r, 10r + 1, ... on rank r, so that each value shows its
    origin.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    collective = Collective(
        CommSpec(op=op, ranks=size, size_bytes=4 * size, dtype="int32"), torch.device("cpu")
    )
    values = torch.arange(collective.input.numel(), dtype=torch.int32) + 10 * rank
    collective.output.zero_()
    collective.input.copy_(values)
    has_input = rank == ROOT or op not in ("broadcast", "scatter")
    if op == "broadcast" and rank != ROOT:
        collective.input.zero_()
    before = _texts(collective.input) if has_input else []
    dist.barrier()
    if op == "barrier":
        time.sleep(LATE_S * rank)
    start = time.perf_counter()
    collective.run()
    wait_ms = (time.perf_counter() - start) * 1e3
    has_output = rank == ROOT or op not in ("reduce", "gather")  # undefined on other ranks
    return Seen(before, _texts(collective.output) if has_output else [], wait_ms)


def _run_ring() -> View:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(size, dtype=torch.int32) + 10 * rank
    before, steps = _texts(tensor), []
    ring = Ring()
    start = time.perf_counter()
    ring.all_reduce(
        tensor,
        watch=lambda name, chunks: steps.append((name, [_texts(chunk) for chunk in chunks])),
    )
    return Seen(before, _texts(tensor), (time.perf_counter() - start) * 1e3), steps


def _texts(tensor: torch.Tensor) -> Values:
    return [str(value) for value in tensor.tolist()]


def _explained(name: str, n: int, views: list[View]) -> Explained:
    seen = [own for own, _ in views]
    if name == RING:
        num_steps = 2 * (n - 1)
        remark = (
            f"{num_steps} steps; each rank sends 2·({n} − 1)·K/{n} of K bytes, whatever the number "
            "of ranks."
        )
        steps = [_ring_step(step, [steps[step] for _, steps in views]) for step in range(num_steps)]
        return Explained("ring all-reduce", _RING_SUMMARY, seen, steps, remark)
    remark = ""
    if name == "barrier":
        remark = f"Rank r arrived {1e3 * LATE_S:.0f}·r ms late: the first waits longest."
    return Explained(name, OPS[name].summary, seen, remark=remark)


def _ring_step(step: int, ranks: list[tuple[str, list[Values]]]) -> RingStep:
    """Returns one step of the ring, in which each rank sends a chunk to the next."""
    n, name = len(ranks), ranks[0][0]
    back = step % (n - 1) + (1 if name.startswith("reduce-scatter") else 0)
    sends = [f"chunk {(r - back) % n} → rank {(r + 1) % n}" for r in range(n)]
    return RingStep(name, sends, [[" ".join(chunk) for chunk in chunks] for _, chunks in ranks])
