"""Durations of pipeline stages for the simulator (timeline.py), for one micro-batch.

Each stage has a forward, the gradients of its inputs, and the gradients of its weights.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Term
from stepgauge.cost.pipeline.timeline import Durations, transfers_of
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import LaunchCost, Operations
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, UNSHARD, WEIGHT
from stepgauge.spec.plan.stages import PartTimes

PHASES = ("forward", "backward")
ATTENTION, FEED_FORWARD = ("attention",), ("feed_forward",)


def durations(
    stages: Sequence[Operations],
    prices: Prices,
    host: Mapping[str, LaunchCost],
    unshard_us: Sequence[float],
) -> Durations:
    """Returns the durations of stages of whole blocks.

    `unshard_us` is the time to gather each stage's weights; 0 if it is not sharded.
    """
    terms = [(list(stage.forward()), list(stage.backward())) for stage in stages]
    nbytes = max(stage.stream_bytes for stage in stages)
    launches = [[host[phase].us(stage.launched(phase)) for phase in PHASES] for stage in stages]
    taken = _durations(terms, launches, prices, nbytes)
    unshard = {(number, UNSHARD): us / 1e3 for number, us in enumerate(unshard_us)}
    return dataclasses.replace(taken, actions={**taken.actions, **unshard})


def _durations(
    stages: Sequence[tuple[Sequence[Term], Sequence[Term]]],
    launches: Sequence[Sequence[float]],
    prices: Prices,
    nbytes: float,
) -> Durations:
    """Returns the durations of stages with these forward and backward terms.

    launches  of each stage, microseconds of the host for forward and for backward. The gradients of
              inputs and of weights share those of backward by their numbers of launches
    nbytes    of what a stage sends to the next one
    """
    actions: dict[tuple[int, str], float] = {}
    hosts: dict[tuple[int, str], float] = {}
    for number, (forward, backward) in enumerate(stages):
        forward_us, backward_us = launches[number]
        actions[number, FORWARD] = prices.total_us(forward) / 1e3
        hosts[number, FORWARD] = forward_us / 1e3
        num_launches = max(1, sum(term.count for term in backward))
        for kind in (INPUT, WEIGHT):
            terms = [term for term in backward if term.for_weights == (kind == WEIGHT)]
            share = sum(term.count for term in terms) / num_launches
            actions[number, kind] = prices.total_us(terms) / 1e3
            hosts[number, kind] = share * backward_us / 1e3
    return Durations(
        actions=actions,
        transfers=transfers_of(len(stages), prices.transfer(nbytes).us / 1e3),
        launches=hosts,
    )


@dataclasses.dataclass(frozen=True)
class Halves:
    """The terms of a network in parts: embedding, half blocks, head (numbered in spec/plan/stages.py).

    The parts of backward have the same numbers: the first one is the embedding.
    """

    forward: Sequence[Sequence[Term]]
    backward: Sequence[Sequence[Term]]

    @classmethod
    def of(cls, whole: StepOperations) -> "Halves":
        layers = len(whole.blocks)
        embedding, block, head = whole.forward_parts()
        forward = [embedding, *_halves_of(block) * layers, head]
        head, block, embedding = whole.backward_parts()
        return cls(forward, [embedding, *_halves_of(block) * layers, head])

    def durations(
        self,
        cuts: Sequence[range],
        prices: Prices,
        *,
        nbytes: float,
        host: Mapping[str, LaunchCost],
    ) -> Durations:
        """Returns the durations of stages that have these parts."""
        stages = [
            (self._terms(self.forward, parts), self._terms(self.backward, parts)) for parts in cuts
        ]
        launches = [[host[phase].us(len(parts) // 2) for phase in PHASES] for parts in cuts]
        return _durations(stages, launches, prices, nbytes)

    def times(self, prices: Prices) -> PartTimes:
        """Returns the times of the parts, by which a network is divided into stages."""
        last = len(self.forward) - 1
        ms = [
            prices.total_us([*self.forward[part], *self.backward[part]]) / 1e3
            for part in (0, 1, 2, last)
        ]
        return PartTimes(*ms)

    def _terms(self, parts: Sequence[Sequence[Term]], numbers: range) -> list[Term]:
        """Returns the terms of a stage's parts.

        An overweight stage has more blocks than the network. They equal the other blocks.
        """
        own = (parts[n] if n < len(parts) else parts[1 + (n + 1) % 2] for n in numbers)
        return list(itertools.chain(*own))


def _halves_of(block: Iterable[Term]) -> list[list[Term]]:
    """Returns a block's terms of attention, and of feed-forward. Terms of both are divided equally."""
    halves: list[list[Term]] = [[], []]
    for term in block:
        name = term.name.removeprefix("recomputed.")
        if name.startswith(ATTENTION):
            halves[0].append(term)
        elif name.startswith(FEED_FORWARD):
            halves[1].append(term)
        elif term.count == 1:  # such as residual sums: one for each half, in this order
            number = sum(t.name == term.name for half in halves for t in half) % 2
            halves[number].append(term)
        else:
            for half in halves:
                half.append(dataclasses.replace(term, count=term.count // 2))
    return halves
