"""Stages of a pipeline as durations for the simulator (timeline.py): what each takes forward,
for its inputs' gradients and for its weights', a micro-batch at a time.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Term
from stepgauge.cost.pipeline.timeline import Durations, transfers_of
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import Launching, Operations
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, UNSHARD, WEIGHT
from stepgauge.spec.plan.stages import PartTimes

PHASES = ("forward", "backward")
ATTENTION, FEED_FORWARD = ("attention",), ("feed_forward",)


def durations(
    stages: Sequence[Operations],
    prices: Prices,
    host: Mapping[str, Launching],
    unshard_us: Sequence[float],
) -> Durations:
    """Of stages of whole blocks. `unshard_us`: to gather the weights of each, where it is sharded."""
    terms = [(list(stage.forward()), list(stage.backward())) for stage in stages]
    nbytes = max(stage.stream_bytes for stage in stages)
    launches = [host[phase].us(stage.launched(phase)) for stage in stages for phase in PHASES]
    found = _durations(terms, launches, prices, nbytes)
    unshard = {(number, UNSHARD): us / 1e3 for number, us in enumerate(unshard_us)}
    return dataclasses.replace(found, actions={**found.actions, **unshard})


def _durations(
    stages: Sequence[tuple[Sequence[Term], Sequence[Term]]],
    launches: Sequence[float],
    prices: Prices,
    nbytes: float,
) -> Durations:
    """Of what stages run forward and backward. `launches`: microseconds of the host for each phase
    of each; `nbytes` of what one gives to the next.
    """
    actions: dict[tuple[int, str], float] = {}
    for number, (forward, backward) in enumerate(stages):
        actions[number, FORWARD] = prices.total_us(forward) / 1e3
        actions[number, WEIGHT] = prices.total_us(t for t in backward if t.weights) / 1e3
        actions[number, INPUT] = prices.total_us(t for t in backward if not t.weights) / 1e3
    return Durations(
        actions=actions,
        transfers=transfers_of(len(stages), prices.transfer(nbytes).us / 1e3),
        host_ms=sum(launches) / len(launches) / 1e3,
    )


@dataclasses.dataclass(frozen=True)
class Halves:
    """A network as parts of half blocks, each with its terms.

    backward's first term list is the head's; numbers are those of spec/plan/stages.py
    """

    forward: Sequence[Sequence[Term]]
    backward: Sequence[Sequence[Term]]

    @classmethod
    def of(cls, whole: StepOperations) -> "Halves":
        first, block, last = whole.forward_parts()
        last_back, block_back, first_back = whole.backward_parts()
        halves, back = _cut(block), _cut(block_back)
        layers = len(whole.blocks)
        return cls([first, *halves * layers, last], [first_back, *back * layers, last_back])

    def durations(
        self, cuts: Sequence[range], prices: Prices, *, nbytes: float, host: Mapping[str, Launching]
    ) -> Durations:
        """Of stages that have these parts."""
        stages = [
            (self._terms(self.forward, parts), self._terms(self.backward, parts)) for parts in cuts
        ]
        launches = [host[phase].us(len(parts) // 2) for parts in cuts for phase in PHASES]
        return _durations(stages, launches, prices, nbytes)

    def times(self, prices: Prices) -> PartTimes:
        """What cuts a network into stages, of whole blocks or of halves."""
        last = len(self.forward) - 1
        ms = [
            prices.total_us([*self.forward[part], *self.backward[part]]) / 1e3
            for part in (0, 1, 2, last)
        ]
        return PartTimes(*ms)

    def _terms(self, parts: Sequence[Sequence[Term]], numbers: range) -> list[Term]:
        """A stage that is overweight has more blocks than the network: parts like the others."""
        every = len(parts)
        own = (parts[n] if n < every else parts[1 + (n + 1) % 2] for n in numbers)
        return list(itertools.chain(*own))


def _cut(block: Iterable[Term]) -> list[list[Term]]:
    """Terms of attention, and of feed-forward; what is in both, half in each."""
    halves: list[list[Term]] = [[], []]
    for term in block:
        name = term.name.removeprefix("recomputed.")
        if name.startswith(ATTENTION):
            halves[0].append(term)
        elif name.startswith(FEED_FORWARD):
            halves[1].append(term)
        elif term.count == 1:  # the residual sums come in the order of the halves
            place = sum(t.name == term.name for half in halves for t in half) % 2
            halves[place].append(term)
        else:
            for half in halves:
                half.append(dataclasses.replace(term, count=term.count // 2))
    return halves
