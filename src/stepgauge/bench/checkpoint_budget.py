"""Solves --checkpointing budget: chooses the recompute plan that fits into the available memory.

The memory of a block is predicted on fake tensors, once for each way to checkpoint it. From these
costs follows the cheapest plan that should fit. The step is then predicted with that plan. If it
takes more than the budget, the excess is added to the bytes that the plan must save, and the search
repeats until a prediction fits.

A compiled step is predicted as an eager one, which bounds it: in 17 pairs of rows of
benchmarks/results/2026-11-21-*-step-*.jsonl and -study.jsonl a compiled step's peak is 0.88 to 0.98 of
the eager one's. With several ranks, one rank's share is predicted as a step in a single process, plus
the memory that the formulas of cost/memory/peak.py give for its wrapper.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgauge.bench.storage_tracking import predict
from stepgauge.cost.memory.peak import step_memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.measure import devices
from stepgauge.measure.environment import device_name
from stepgauge.measure.memory.timeline import by_block
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.hardware import ACCELERATORS, Peaks, peaks
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import CHECKPOINTED, BlockCosts, RecomputePlan, cheapest
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.spec.units import GIB

MOST_TRIALS = 8  # predicted plans; each must save more than the one before
# Used for a device without known peaks. The choice of the plan depends only on the ratio of the
# peaks of matrix products and memory.
DEFAULT_PEAKS = ACCELERATORS["NVIDIA H100 80GB HBM3"]
SHARED = ("model", "size", "batch", "precision", "optimizer", "memory_gib", "device", "seed")


@dataclasses.dataclass(frozen=True)
class Solution:
    """The chosen plan with its predicted peak and recompute time; no plan if the spec has no budget."""

    plan: RecomputePlan | None = None
    budget_bytes: int = 0
    peak_bytes: int = 0
    recompute_ms: float = 0.0

    @property
    def note(self) -> str:
        return f"computed again: {self.plan}" if self.plan else ""

    def environment(self) -> dict[str, Any]:
        """Returns the entries of a record's environment."""
        if self.plan is None:
            return {}
        return {
            "checkpointing": str(self.plan),
            "checkpointing_budget_bytes": self.budget_bytes,
            "checkpointing_predicted_peak_bytes": self.peak_bytes,
            "checkpointing_predicted_recompute_ms": self.recompute_ms,
        }


def solve(spec: WorkSpec | TrainSpec | LayoutSpec) -> Solution:
    """Returns the solution of the spec's checkpointing budget, if it has one. All ranks must call it;
    all get the same solution.

    Raises ValueError if no plan fits into the budget, or if memory_gib is 0 and the free memory is
    unknown.
    """
    if spec.checkpointing != "budget":
        return Solution()
    layout = spec.parsed_layout
    shared = {name: getattr(spec, name) for name in SHARED} | {"batch": spec.batch // layout.data}
    step = MemorySpec(**shared, checkpointing="none", predict=getattr(spec, "predict", "no"))
    budget = _budget_bytes(step, layout.ranks)
    step = dataclasses.replace(step, memory_gib=0.0)
    layers, wrapper_bytes = step.network.num_layers, _wrapper_bytes(step, layout)

    def peak_of(plan: RecomputePlan) -> int:
        return _predicted(step, plan).peak_bytes + wrapper_bytes

    if (full_peak := peak_of(RecomputePlan(layers))) <= budget:
        return Solution(RecomputePlan(layers), budget, full_peak, 0.0)
    # In zero3's backward, an uncompiled block cannot recompute a part that reads its weights.
    has_feed_forward = layout.wrapper != "zero3" or spec.compile != "off"
    costs = _costs(step, [n for n in CHECKPOINTED if has_feed_forward or n != "feed-forward"])
    plan, peak = _first_that_fits(layers, costs, peak_of, full_peak, budget)
    return Solution(plan, budget, peak, costs.us(plan) / 1e3)


def _first_that_fits(
    layers: int,
    costs: BlockCosts,
    peak_of: Callable[[RecomputePlan], int],
    full_peak: int,
    budget: int,
) -> tuple[RecomputePlan, int]:
    """Tries plans that save more and more, and returns the first that fits, with its predicted peak.

    full_peak  peak bytes without checkpointing
    """
    needed, least = float(full_peak - budget), full_peak
    for trial in range(MOST_TRIALS):
        plan = cheapest(layers, costs, needed if trial + 1 < MOST_TRIALS else math.inf)
        peak = peak_of(plan)
        if peak <= budget:
            return plan, peak
        least = min(least, peak)
        if plan.blocks == plan.num_layers:
            break
        needed = costs.saved_bytes(plan) + peak - budget
    raise ValueError(
        f"memory_gib is {budget / GIB:.3g}, which is too small for every plan: the least found is "
        f"{least / GIB:.3g} GiB"
    )


def _budget_bytes(spec: MemorySpec, ranks: int) -> int:
    if spec.memory_gib:
        return int(spec.memory_gib * GIB)
    if spec.predict != "no":
        raise ValueError(
            "memory_gib is 0; --predict with --checkpointing budget needs --memory-gib"
        )
    device = torch.device(spec.device)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        host = devices.available_host_bytes() if device.type == "cpu" else None
        if host is None:
            raise ValueError(f"memory_gib is 0, and the free memory of {spec.device} is not known")
        free = host // ranks
    return min(gathered_objects(free)) if ranks > 1 else free


def _wrapper_bytes(spec: MemorySpec, layout: Layout) -> int:
    """Returns the bytes by which a rank's peak exceeds that of a single process. The number is
    negative if the wrapper shards weights, gradients or optimizer state.
    """
    if layout.ranks == 1:
        return 0
    # The formulas assume AdamW's optimizer state.
    absent = ("optimizer state",) if spec.optimizer == "sgd" else ()

    def peak(layout: Layout) -> float:
        part = NetworkPart(batch=spec.batch, gathered=layout.gathers_weights)
        items = step_memory(StepOperations(spec, part), layout).items
        return sum(item.bytes for item in items if item.name not in absent)

    return int(peak(layout) - peak(Layout()))


@dataclasses.dataclass(frozen=True)
class PredictedMemory:
    """Predicted memory of a step.

    peak_bytes   the peak; on a GPU, the bytes that the caching allocator reserves
    block_bytes  bytes that one block keeps for backward
    """

    peak_bytes: int
    block_bytes: float


@functools.cache
def _predicted(spec: MemorySpec, plan: RecomputePlan | None = None) -> PredictedMemory:
    step = predict(spec, plan=plan).step
    saved = by_block(step.saved_for_backward(), step.bytes_of)
    saved_by_blocks = sum(size for name, size in saved.items() if "blocks" in name)
    peak = max(step.reserved or 0, step.peak.total)
    return PredictedMemory(peak, saved_by_blocks / spec.network.num_layers)


def _costs(spec: MemorySpec, ways: Sequence[str]) -> BlockCosts:
    """Predicts what a block keeps and how long it recomputes, for each way of checkpointing."""
    network, layers = spec.network, spec.network.num_layers
    short = dataclasses.replace(network, num_layers=min(8, layers))  # all blocks are alike
    kept = {
        name: _predicted(dataclasses.replace(spec, model=short, checkpointing=name)).block_bytes
        for name in ("none", *ways)
    }
    device = _device_peaks(spec)
    sequence = network.context_length
    flops = network.forward_flops(batch=spec.batch, sequence=sequence)
    head = 2 * spec.batch * sequence * network.vocab_size * network.d_model
    num_up = 2 if isinstance(network, ModelSpec) and network.is_gated else 1
    up = 2 * spec.batch * sequence * network.d_model * num_up * network.d_ff
    recomputed_flops = {"blocks": (flops - head) / layers, "feed-forward": up}

    def recompute_us(name: str) -> float:
        # Recomputing writes the bytes that were not kept and reads about as many.
        memory_s = 2 * (kept["none"] - kept[name]) / device.memory_bytes_per_s
        return 1e6 * (memory_s + recomputed_flops.get(name, 0) / (device.of(spec.precision) or 1.0))

    return BlockCosts(kept_bytes=kept, recompute_us={name: recompute_us(name) for name in kept})


def _device_peaks(spec: MemorySpec) -> Peaks:
    device = torch.device(spec.device)
    if spec.predict == "no" and device.type == "cuda":
        return peaks(device_name(device)) or DEFAULT_PEAKS
    return DEFAULT_PEAKS
