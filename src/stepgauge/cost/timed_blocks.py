"""Steps whose blocks were timed whole: their terms run at that pace, and the host launches as it did.

The time of a block is measured, and each of its terms gets a share of it in proportion to its price.
What a step adds to its blocks (other ranks, more passes, waiting stages) is predicted as usual.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.spec.blocks import LAYERS, TimedBlocks, operation_of, whole_weights
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec


def timed_blocks(work: WorkSpec, machine: CalibratedMachine, layout: Layout) -> TimedBlocks | None:
    """Returns the blocks that were timed on this machine itself; its base has another pace.

    None if there are none. They cover whole steps without context parallelism only.
    """
    is_covered = layout.context == 1 and getattr(work, "phases", "step") != "forward"
    if not is_covered or not isinstance(work.model, ModelSpec):
        return None
    table = machine.hardware.operations.get(operation_of(work, layout))
    return TimedBlocks(table) if table else None


def as_timed(operations: StepOperations, prices: Prices) -> StepOperations:
    """Returns the operations at the pace of timed blocks, or unchanged if there are none.

    Blocks timed with ZeRO 3 wait for their weights. They give the host's time and the update only; the
    device's time comes from blocks timed with whole weights.
    """
    share = operations.share
    timed = timed_blocks(operations.spec, prices.machine, prices.layout)
    if timed is None:
        return operations
    single_pass = dataclasses.replace(share, blocks=None, passes=1)
    network = StepOperations(operations.spec, single_pass)
    paced = copy.copy(operations)
    paced.paces = {("optimizer", False): _update_pace(network, prices, timed)}
    unsharded = whole_weights(prices.layout)
    if timed_unsharded := timed_blocks(operations.spec, prices.machine, unsharded):
        unsharded_share = dataclasses.replace(single_pass, gathered=False)
        network = StepOperations(operations.spec, unsharded_share)
        paced.paces |= _paces(network, prices, timed_unsharded)
    return paced


def _paces(
    network: StepOperations, prices: Prices, timed: TimedBlocks
) -> Mapping[tuple[str, bool], float]:
    """Returns measured over priced time, by phase, of blocks (True) and of everything else (False)."""
    paces = {}
    for phase, (first, block, last) in (
        ("forward", network.forward_parts()),
        ("backward", network.backward_parts()),
    ):
        for is_block, terms, measured_us in (
            (True, block, timed.block_us(phase, "device")),
            (False, [*first, *last], timed.outside_us(phase, "device")),
        ):
            paces[phase, is_block] = measured_us / (prices.total_us(terms) or math.inf)
    return paces


def _update_pace(network: StepOperations, prices: Prices, timed: TimedBlocks) -> float:
    """Returns measured over priced time of the update of a rank's parameters."""
    depth = LAYERS[-1]
    measured_us = timed.outside_us("optimizer", "device")
    measured_us += depth * timed.block_us("optimizer", "device")
    numel = network.end_parameters + depth * network.block_parameters
    update = network.optimizer(numel / (prices.layout.data if network.share.gathered else 1))
    return measured_us / prices.total_us([update])
