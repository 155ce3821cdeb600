"""Blocks that were timed whole at the shapes of a step, where the hardware file has them: the step's
terms then run at that pace, and the host launches as it did there.

A block's time is measured, its parts are priced: each takes its share of the whole. What a step
adds to its blocks (other ranks, more passes, stages that wait) is predicted as ever.
"""

import copy
from collections.abc import Mapping

from stepgauge.cost.machine import Machine
from stepgauge.cost.operations import StepOperations
from stepgauge.cost.prices import Prices
from stepgauge.cost.share import NetworkPart
from stepgauge.spec.blocks import LAYERS, TimedBlocks, operation_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

# A phase that takes more than so many times of what the host takes is bound by the device.
BOUND_BY_DEVICE = 1.05


def timed_blocks(work: WorkSpec, machine: Machine) -> TimedBlocks | None:
    """Those of the machine itself: another one's pace is not this one's. They are of whole steps."""
    if not isinstance(work.model, ModelSpec) or getattr(work, "phases", "step") == "forward":
        return None
    table = machine.hardware.operations.get(operation_of(work))
    return TimedBlocks(table) if table else None


def as_timed(operations: StepOperations, prices: Prices) -> StepOperations:
    """The operations at the pace of blocks that were timed; as they are where none were, and where
    ranks share a block's work or send its weights.
    """
    share, found = operations.share, timed_blocks(operations.spec, prices.machine)
    if found is None or share.tensor > 1 or share.gathered:
        return operations
    whole = StepOperations(operations.spec, NetworkPart(batch=share.batch))
    paced = copy.copy(operations)
    paced.paces = _paces(whole, prices, found)
    return paced


def _paces(
    whole: StepOperations, prices: Prices, found: TimedBlocks
) -> Mapping[tuple[str, bool], float]:
    """Measured over priced time by phase, of blocks (True) and of what is outside of them."""
    paces = {}
    for phase, (first, block, last) in (
        ("forward", whole.forward_parts()),
        ("backward", whole.backward_parts()),
    ):
        paces[phase, True] = _pace(
            found.block_us(phase, "device"), found.block_us(phase, "host"), prices.total_us(block)
        )
        paces[phase, False] = _pace(
            found.outside_us(phase, "device"),
            found.outside_us(phase, "host"),
            prices.total_us([*first, *last]),
        )
    device, host = (
        found.outside_us("optimizer", clock) + LAYERS[-1] * found.block_us("optimizer", clock)
        for clock in ("device", "host")
    )
    update = whole.optimizer(whole.end_parameters + LAYERS[-1] * whole.block_parameters)
    paces["optimizer", False] = _pace(device, host, prices.total_us([update]))
    return paces


def _pace(device_us: float, host_us: float, priced_us: float) -> float:
    """Where the device waited for the host, its own work took at most as long as the host's."""
    pace = device_us / priced_us if priced_us else 1.0
    return pace if device_us > BOUND_BY_DEVICE * host_us else min(1.0, pace)
