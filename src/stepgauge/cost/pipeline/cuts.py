"""Divides a network into stages such that the simulated step is shortest.

Equal stages are not always best: the first ranks start first and have time for more. If a network has
few parts per stage, loads cannot be equal, and it matters which rank has more.
"""

import itertools
from collections.abc import Sequence

from stepgauge.cost.pipeline.timeline import Durations, Simulator
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import Schedule, lower
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, WEIGHT
from stepgauge.spec.plan.pipeline.balance import balance, equal_borders, moves
from stepgauge.spec.plan.stages import (
    HALVES,
    STEP,
    PartTimes,
    block_weights,
    cut_at,
    cut_blocks,
)
from stepgauge.spec.train import TrainSpec

Borders = tuple[int, ...]


def shortest_cut(
    weights: Sequence[float], schedule: Schedule, *, overweight: int = 0
) -> list[range]:
    """Returns the parts of each stage, as `cut_parts` does.

    The search starts once with equally many parts per stage and once with balanced weights, and moves
    borders (pipeline/balance.py) while the step gets shorter. F, I and W of a part each take a third of
    its weight, and transfers take no time. Raises ValueError for fewer parts than stages.
    """
    loads = balance(weights, list(schedule.rank_of.values()))
    starts = [(0, *itertools.accumulate(loads)), equal_borders(len(weights), len(loads))]
    search = _Search(weights, schedule)
    best = min(map(search.descend, starts), key=search.step)
    return cut_at(
        [end - begin for begin, end in itertools.pairwise(best)], len(HALVES) * overweight
    )


def stages_of(spec: PipelineSpec, times: PartTimes | None = None) -> list[range]:
    """Returns the parts of each stage. `times` is required if the spec balances by time."""
    if spec.balance != STEP:
        return spec.stages(times)
    assert times is not None, "whoever runs or predicts the spec has them"
    weights = times.of(spec.model.num_layers)
    return shortest_cut(weights, spec.plan(), overweight=spec.overweight)


def blocks_of(
    spec: LayoutSpec | TrainSpec, layout: Layout, times: PartTimes | None = None
) -> list[range]:
    """Returns the blocks of each stage of a layout. `times` as in `stages_of`."""
    if layout.pipeline == 1:
        return [range(spec.network.num_layers)]
    schedule = schedule_of(layout)
    if spec.balance != STEP:
        return cut_blocks(spec.network, schedule, times)
    assert times is not None, "whoever runs or predicts the spec has them"
    return shortest_cut(block_weights(spec.network, times), schedule)


class _Search:
    """Local search over the borders between stages."""

    def __init__(self, weights: Sequence[float], schedule: Schedule):
        self._simulator = Simulator(lower(schedule))
        self._sums = [0.0, *itertools.accumulate(weights)]
        self._steps: dict[Borders, float] = {}

    def step(self, borders: Borders) -> float:
        """Returns the simulated step, in thirds of the weights' unit."""
        if borders not in self._steps:
            actions = {
                (stage, kind): self._sums[end] - self._sums[begin]
                for stage, (begin, end) in enumerate(itertools.pairwise(borders))
                for kind in (FORWARD, INPUT, WEIGHT)
            }
            self._steps[borders] = self._simulator.timeline(Durations(actions=actions)).step_ms
        return self._steps[borders]

    def descend(self, borders: Borders) -> Borders:
        """Moves borders until no move makes the step shorter."""
        while (better := self._shorter(borders)) is not None:
            borders = better
        return borders

    def _shorter(self, borders: Borders) -> Borders | None:
        least = self.step(borders) * (1 - 1e-9)
        return next((tried for tried in moves(borders) if self.step(tried) < least), None)
