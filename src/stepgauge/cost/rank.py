"""What a rank runs and what it holds at most, whichever way its network is known: by the formulas of
the Transformer, which need no torch, or by the operators of any network, which were traced as one
rank of the layout runs them. Both are lists of operations with their sizes; nothing after this
asks which.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.cost.host import launching
from stepgauge.cost.memory.peak import Memory, pipeline_memory, step_memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import NCCL, Prices
from stepgauge.cost.streams.program import Launching, Operations, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.cost.traced.memory import traced_memory, traced_pipeline_memory
from stepgauge.cost.traced.network import TracedNetwork, TracedOperations
from stepgauge.spec.layout import Layout
from stepgauge.spec.plan.pipeline import Schedule


def operations_of(work: Any, share: NetworkPart, traced: TracedNetwork | None = None) -> Operations:
    """Of a share of the step. Raises ValueError for what has neither formulas nor a trace."""
    if traced is None:
        return StepOperations(work, share)
    return TracedOperations(work, share, traced)


def at_pace(operations: Operations, prices: Prices) -> Operations:
    """At the pace of blocks that were timed whole, where the network has formulas and the hardware
    file such blocks.
    """
    return as_timed(operations, prices) if isinstance(operations, StepOperations) else operations


def host_of(
    operations: Operations, machine: CalibratedMachine, layout: Layout, *, replayed: bool = False
) -> dict[str, Launching]:
    """What launching them takes, by phase; `replayed`: forward and backward are CUDA graphs. What
    backward computes again is among traced operators.
    """
    work = operations.spec
    if isinstance(operations, TracedOperations):
        work = dataclasses.replace(work, checkpointing="none")
    found = launching(work, machine, layout)
    return {**found, "forward": Launching(), "backward": Launching()} if replayed else found


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
    """What a rank of a layout without a pipeline runs, at the prices of the machine."""
    priced = operations_of(work, share, traced)
    prices = Prices(machine, layout, library).paced_by(priced)
    operations = at_pace(priced, prices)
    host = host_of(operations, machine, layout, replayed=replayed)
    return RankStep(operations, prices, host)


def phases_of(operations: Operations, phases: str) -> Mapping[str, list[Any]]:
    """Terms of what the `phases` of a WorkSpec run, in order."""
    found = {"forward": list(operations.forward())}
    if phases != "forward":
        found["backward"] = list(operations.backward())
    if phases == "step":
        found["optimizer"] = [operations.optimizer(operations.num_parameters)]
    return found


def peak_of(operations: Operations, layout: Layout, *, accumulates: bool = False) -> Memory | None:
    """Of a rank without a pipeline; None where the trace has not followed memory."""
    if isinstance(operations, StepOperations):
        return step_memory(operations, layout, accumulates=accumulates)
    assert isinstance(operations, TracedOperations)
    return traced_memory(operations, layout, accumulates=accumulates)


def peak_of_stages(
    stages: Sequence[Operations], layout: Layout, schedule: Schedule, *, accumulates: bool
) -> Memory | None:
    """Of the fullest rank of a pipeline; None where the trace has not followed memory."""
    known = [stage for stage in stages if isinstance(stage, StepOperations)]
    if known:
        return pipeline_memory(known, layout, schedule, accumulates=accumulates)
    traced = [stage for stage in stages if isinstance(stage, TracedOperations)]
    return traced_pipeline_memory(traced, layout, schedule, accumulates=accumulates)
