"""What one rank runs, and the most memory that it holds.

A network is known by the formulas of the Transformer, or by operators that torch traced as one rank of
the layout runs them. Both become lists of terms, and the code after this file does not distinguish
them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.cost.data_axis.ownership import num_updated
from stepgauge.cost.host import launch_costs
from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.memory.peak import pipeline_memory, step_memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import NCCL, Prices, StageChain
from stepgauge.cost.streams.program import LaunchCost, Operations, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.cost.traced.memory import traced_memory, traced_pipeline_memory
from stepgauge.cost.traced.network import TracedNetwork, TracedOperations
from stepgauge.spec.layout import Layout
from stepgauge.spec.plan.pipeline import Schedule


def operations_of(work: Any, share: NetworkPart, traced: TracedNetwork | None = None) -> Operations:
    """Returns the operations of a rank's share. Raises ValueError without formulas and trace."""
    if traced is None:
        return StepOperations(work, share)
    return TracedOperations(work, share, traced)


def with_block_times(operations: Operations, prices: Prices) -> Operations:
    """Returns the operations at the pace of blocks that were timed whole, if the network has formulas
    and the hardware file has such blocks.
    """
    return as_timed(operations, prices) if isinstance(operations, StepOperations) else operations


def launch_costs_of(
    operations: Operations, machine: CalibratedMachine, layout: Layout, *, replayed: bool = False
) -> dict[str, LaunchCost]:
    """Returns the host's time by phase. If `replayed`, forward and backward are CUDA graphs."""
    work = operations.spec
    if isinstance(operations, TracedOperations):  # recomputed operators were traced with the others
        work = dataclasses.replace(work, checkpointing="none")
    costs = launch_costs(work, machine, layout)
    return {**costs, "forward": LaunchCost(), "backward": LaunchCost()} if replayed else costs


def at_step_share(prices: Prices, stages: Sequence[Operations], *, busy: float = 1.0) -> Prices:
    """Returns prices at the share of products in a step of a pipeline's stages, or of the only one.

    `busy` as in Prices.at_product_share_of.
    """
    layout, updates = prices.layout, []
    if stages[0].spec.phases == "step":
        updates = [
            stage.optimizer(num_updated(stage, layout.wrapper, layout.num_replicas))
            for stage in stages
        ]
    passes = stages[0].share.passes
    return prices.at_product_share_of(StageChain(stages), passes=passes, updates=updates, busy=busy)


def rank_step_of(
    work: Any,
    share: NetworkPart,
    machine: CalibratedMachine,
    *,
    layout: Layout,
    traced: TracedNetwork | None = None,
    library: str = NCCL,
    replayed: bool = False,
) -> RankStep:
    """Returns the step of a rank in a layout without a pipeline, with its prices and launch costs."""
    operations = operations_of(work, share, traced)
    prices = at_step_share(Prices(machine, layout, library), [operations])
    operations = with_block_times(operations, prices)
    host = launch_costs_of(operations, machine, layout, replayed=replayed)
    return RankStep(operations, prices, host)


def phases_of(operations: Operations, phases: str) -> Mapping[str, list[Any]]:
    """Returns the terms of each phase, in order. `phases` as in WorkSpec."""
    terms = {"forward": list(operations.forward())}
    if phases != "forward":
        terms["backward"] = list(operations.backward())
    if phases == "step":
        terms["optimizer"] = [operations.optimizer(operations.num_parameters)]
    return terms


def peak_of(operations: Operations, layout: Layout, *, accumulates: bool = False) -> Memory | None:
    """Returns the peak of a rank without a pipeline; None if the trace did not follow memory."""
    if isinstance(operations, StepOperations):
        return step_memory(operations, layout, accumulates=accumulates)
    assert isinstance(operations, TracedOperations)
    return traced_memory(operations, layout, accumulates=accumulates)


def peak_of_stages(
    stages: Sequence[Operations], layout: Layout, schedule: Schedule, *, accumulates: bool
) -> Memory | None:
    """Returns the peak of the fullest pipeline rank; None if the trace did not follow memory."""
    by_formula = [stage for stage in stages if isinstance(stage, StepOperations)]
    if by_formula:
        return pipeline_memory(by_formula, layout, schedule, accumulates=accumulates)
    traced = [stage for stage in stages if isinstance(stage, TracedOperations)]
    return traced_pipeline_memory(traced, layout, schedule, accumulates=accumulates)
