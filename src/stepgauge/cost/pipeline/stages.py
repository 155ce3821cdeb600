"""Stages of a pipeline as durations for the simulator (timeline.py): what each takes forward,
for its inputs' gradients and for its weights', a micro-batch at a time.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Term
from stepgauge.cost.pipeline.timeline import Durations
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import Launching, Operations
from stepgauge.spec.plan.pipeline import Channel, Schedule
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, UNSHARD, WEIGHT
from stepgauge.spec.plan.stages import PartTimes

ATTENTION, FEED_FORWARD = ("attention",), ("feed_forward",)


def durations(
    stages: Sequence[Operations],
    schedule: Schedule,
    prices: Prices,
    host: Mapping[str, Launching],
    unshard_us: Sequence[float],
) -> Durations:
    """Of stages of whole blocks. `unshard_us`: to gather the weights of each, where it is sharded."""
    actions: dict[tuple[int, str], float] = {}
    for number, stage in enumerate(stages):
        weights = [term for term in stage.backward() if term.weights]
        forward = prices.total_us(stage.forward()) / 1e3
        backward = prices.total_us(stage.backward()) / 1e3
        weight = prices.total_us(weights) / 1e3
        actions |= {(number, FORWARD): forward, (number, WEIGHT): weight}
        actions[number, INPUT] = backward - weight
        actions[number, UNSHARD] = unshard_us[number] / 1e3
    nbytes = max(stage.stream_bytes for stage in stages)
    launches = [
        host[phase].us(stage.launched(phase)) / 1e3
        for stage in stages
        for phase in ("forward", "backward")
    ]
    return Durations(
        actions=actions,
        transfers=transfers(schedule, prices, nbytes),
        host_ms=sum(launches) / len(launches),
    )


def transfers(schedule: Schedule, prices: Prices, nbytes: float) -> dict[Channel, float]:
    """ms of a tensor between stages on different ranks."""
    ms = prices.transfer(nbytes).us / 1e3
    edges = [(a, b) for a in range(schedule.num_stages) for b in (a - 1, a + 1)]
    return {Channel(a, b): ms for a, b in edges}


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
        self, cuts: Sequence[range], schedule: Schedule, prices: Prices, *, nbytes: float,
        host: Mapping[str, Launching],
    ) -> Durations:  # fmt: skip
        """Of stages that have these parts."""
        actions: dict[tuple[int, str], float] = {}
        for number, parts in enumerate(cuts):
            backward = [term for part in parts for term in self._part(self.backward, part)]
            forward = (term for part in parts for term in self._part(self.forward, part))
            actions[number, FORWARD] = prices.total_us(forward) / 1e3
            actions[number, WEIGHT] = prices.total_us(t for t in backward if t.weights) / 1e3
            actions[number, INPUT] = prices.total_us(t for t in backward if not t.weights) / 1e3
        launched = [host[phase].us(len(p) // 2) for p in cuts for phase in ("forward", "backward")]
        return Durations(
            actions=actions,
            transfers=transfers(schedule, prices, nbytes),
            host_ms=sum(launched) / len(launched) / 1e3,
        )

    def times(self, prices: Prices) -> PartTimes:
        """What cuts a network into stages, of whole blocks or of halves."""
        last = len(self.forward) - 1
        ms = [
            prices.total_us([*self.forward[part], *self.backward[part]]) / 1e3
            for part in (0, 1, 2, last)
        ]
        return PartTimes(*ms)

    def _part(self, parts: Sequence[Sequence[Term]], number: int) -> Sequence[Term]:
        """A stage that is overweight has more blocks than the network: parts like the others."""
        return parts[number] if number < len(parts) else parts[1 + (number + 1) % 2]


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
