"""Blocks that were timed whole at the shapes of a step, where the hardware file has them: the step's
terms then run at that pace, and the host launches as it did there.

A block's time is measured, its parts are priced: each takes its share of the whole. What a step
adds to its blocks (other ranks, more passes, stages that wait) is predicted as ever.
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
    """Those of the machine itself: another one's pace is not this one's. They are of whole steps and sequences."""
    is_whole = layout.context == 1 and getattr(work, "phases", "step") != "forward"
    if not is_whole or not isinstance(work.model, ModelSpec):
        return None
    table = machine.hardware.operations.get(operation_of(work, layout))
    return TimedBlocks(table) if table else None


def as_timed(operations: StepOperations, prices: Prices) -> StepOperations:
    """The operations at the pace of blocks that were timed; as they are where none were. Blocks that
    wait for weights (ZeRO 3) say what the host takes and what the update takes; how long they
    compute, blocks say whose weights are there.
    """
    share = operations.share
    found = timed_blocks(operations.spec, prices.machine, prices.layout)
    if found is None:
        return operations
    one = dataclasses.replace(share, blocks=None, passes=1)
    whole = StepOperations(operations.spec, one)
    paced = copy.copy(operations)
    paced.paces = {("optimizer", False): _update_pace(whole, prices, found)}
    there = whole_weights(prices.layout)
    if computed := timed_blocks(operations.spec, prices.machine, there):
        has_weights = dataclasses.replace(one, gathered=False)
        paced.paces |= _paces(StepOperations(operations.spec, has_weights), prices, computed)
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
        for is_block, terms, us in (
            (True, block, found.block_us),
            (False, [*first, *last], found.outside_us),
        ):
            paces[phase, is_block] = us(phase, "device") / (prices.total_us(terms) or math.inf)
    return paces


def _update_pace(whole: StepOperations, prices: Prices, found: TimedBlocks) -> float:
    """Of a rank's part of the parameters."""
    taken = found.outside_us("optimizer", "device")
    taken += LAYERS[-1] * found.block_us("optimizer", "device")
    numel = whole.end_parameters + LAYERS[-1] * whole.block_parameters
    update = whole.optimizer(numel / (prices.layout.data if whole.share.gathered else 1))
    return taken / prices.total_us([update])
