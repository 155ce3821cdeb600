"""--checkpointing budget: what backward computes again, solved from the memory that there is.

The step is run on tensors without memory with every block kept, kept in the parts that there are
names for, and computed again: that gives a block's bytes. The cheapest plan that fits by them is run
so as well, and what it takes too much is added to what must be saved, until a plan's own prediction
fits.

Of a compiled step the eager one is predicted, which bounds it: in 17 pairs of rows of
benchmarks/results/2026-11-21-*-step-*.jsonl and -study.jsonl a compiled step's peak is 0.88 to 0.98 of
the eager one's. Of a rank, its share's step alone, and what the formulas of cost/memory/peak.py add for its wrapper.
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

TRIALS = 8  # plans that are predicted, each with more to save than the one before
# Only the ratio of a product's rate to memory's decides; a device without a data sheet has an H100's.
LIKE = ACCELERATORS["NVIDIA H100 80GB HBM3"]
SHARED = ("model", "size", "batch", "precision", "optimizer", "memory_gib", "device", "seed")


@dataclasses.dataclass(frozen=True)
class Solution:
    """The plan, the peak that is predicted for it, and the time it is predicted to add. No plan
    where the spec has no budget.
    """

    plan: RecomputePlan | None = None
    budget_bytes: int = 0
    peak_bytes: int = 0
    recompute_ms: float = 0.0

    @property
    def note(self) -> str:
        return f"computed again: {self.plan}" if self.plan else ""

    def environment(self) -> dict[str, Any]:
        """For a record's environment."""
        if self.plan is None:
            return {}
        return {
            "checkpointing": str(self.plan),
            "checkpointing_budget_bytes": self.budget_bytes,
            "checkpointing_predicted_peak_bytes": self.peak_bytes,
            "checkpointing_predicted_recompute_ms": self.recompute_ms,
        }


def solve(spec: WorkSpec | TrainSpec | LayoutSpec) -> Solution:
    """The solution of the spec's budget, if it has one; of several ranks, which must all call it, of
    each the same.

    Raises ValueError for a budget that no plan holds, or that is neither given nor known.
    """
    if spec.checkpointing != "budget":
        return Solution()
    layout = spec.parsed_layout
    given = {name: getattr(spec, name) for name in SHARED} | {"batch": spec.batch // layout.data}
    step = MemorySpec(**given, checkpointing="none", predict=getattr(spec, "predict", "no"))
    budget = _budget_bytes(step, layout.ranks)
    step = dataclasses.replace(step, memory_gib=0.0)
    layers, more = step.network.num_layers, _wrapper_bytes(step, layout)

    def peak(plan: RecomputePlan) -> int:
        return _predicted(step, plan).peak_bytes + more

    if (whole := peak(RecomputePlan(layers))) <= budget:
        return Solution(RecomputePlan(layers), budget, whole, 0.0)
    # a block that is not compiled cannot look for its weights in zero3's backward
    within = layout.wrapper != "zero3" or spec.compile != "off"
    costs = _costs(step, [name for name in CHECKPOINTED if within or name != "feed-forward"])
    plan, found = _first_that_fits(layers, costs, peak, whole, budget)
    return Solution(plan, budget, found, costs.us(plan) / 1e3)


def _first_that_fits(
    layers: int,
    costs: BlockCosts,
    peak: Callable[[RecomputePlan], int],
    whole: int,
    budget: int,
) -> tuple[RecomputePlan, int]:
    """The plan and its predicted peak, of those that save more and more of `whole`."""
    needed, least = float(whole - budget), whole
    for trial in range(TRIALS):
        plan = cheapest(layers, costs, needed if trial + 1 < TRIALS else math.inf)
        found = peak(plan)
        if found <= budget:
            return plan, found
        least = min(least, found)
        if plan.blocks == plan.num_layers:
            break
        needed = costs.saved_bytes(plan) + found - budget
    raise ValueError(
        f"memory_gib is {budget / GIB:.3g}, which no checkpointing holds: the least found is "
        f"{least / GIB:.3g} GiB"
    )


def _budget_bytes(spec: MemorySpec, ranks: int) -> int:
    if spec.memory_gib:
        return int(spec.memory_gib * GIB)
    if spec.predict != "no":
        raise ValueError("memory_gib is 0; --predict needs the GiB that --checkpointing budget has")
    device = torch.device(spec.device)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        host = devices.available_host_bytes() if device.type == "cpu" else None
        if host is None:
            raise ValueError(f"memory_gib is 0, and what {spec.device} has free is not known")
        free = host // ranks
    if ranks > 1:  # that all have one plan
        free = min(gathered_objects(free))
    return free


def _wrapper_bytes(spec: MemorySpec, layout: Layout) -> int:
    """What a rank of a data axis has at its peak beside what it would have alone; less than 0 where
    weights, gradients or state are sharded.
    """
    if layout.ranks == 1:
        return 0

    def peak(place: Layout) -> float:
        part = NetworkPart(batch=spec.batch, gathered=place.gathers_weights)
        found = step_memory(StepOperations(spec, part), place)
        # the formulas' state is AdamW's
        without = ("optimizer state",) if spec.optimizer == "sgd" else ()
        return sum(item.bytes for item in found.items if item.name not in without)

    return int(peak(layout) - peak(Layout()))


@dataclasses.dataclass(frozen=True)
class PredictedMemory:
    """Of a step: its peak, of a GPU what the caching allocator reserves; and what a block keeps
    for backward.
    """

    peak_bytes: int
    block_bytes: float


@functools.cache
def _predicted(spec: MemorySpec, plan: RecomputePlan | None = None) -> PredictedMemory:
    step = predict(spec, plan=plan).step
    saved = by_block(step.saved_for_backward(), step.bytes_of)
    of_blocks = sum(size for name, size in saved.items() if "blocks" in name)
    peak = max(step.reserved or 0, step.peak.total)
    return PredictedMemory(peak, of_blocks / spec.network.num_layers)


def _costs(spec: MemorySpec, ways: Sequence[str]) -> BlockCosts:
    network, layers = spec.network, spec.network.num_layers
    few = dataclasses.replace(network, num_layers=min(8, layers))  # one is like the next
    kept = {
        name: _predicted(dataclasses.replace(spec, model=few, checkpointing=name)).block_bytes
        for name in ("none", *ways)
    }
    rates = _rates(spec)
    sequence = network.context_length
    flops = network.forward_flops(batch=spec.batch, sequence=sequence)
    head = 2 * spec.batch * sequence * network.vocab_size * network.d_model
    widths = 2 if isinstance(network, ModelSpec) and network.is_gated else 1
    up = 2 * spec.batch * sequence * network.d_model * widths * network.d_ff
    products = {"blocks": (flops - head) / layers, "feed-forward": up}

    def again_us(name: str) -> float:  # what is not kept is written again, and as much read
        passes = 2 * (kept["none"] - kept[name]) / rates.memory_bytes_per_s
        return 1e6 * (passes + products.get(name, 0) / (rates.of(spec.precision) or 1.0))

    return BlockCosts(kept_bytes=kept, recompute_us={name: again_us(name) for name in kept})


def _rates(spec: MemorySpec) -> Peaks:
    device = torch.device(spec.device)
    known = peaks(device_name(device)) if spec.predict == "no" and device.type == "cuda" else None
    return known or LIKE
