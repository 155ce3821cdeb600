"""Cuts a network into the stages of a pipeline.

The parts of a network are numbered: the embeddings, then two halves of each block (attention and
feed-forward), then the head.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline.action import Schedule
from stepgauge.spec.plan.pipeline.balance import balance

FLOPS, TIME, STEP = "flops", "time", "step"
BY_TIMES = (TIME, STEP)  # these use the time of each part, measured or predicted
HALVES = ("attention", "feed_forward")


class PartTimes(NamedTuple):
    """Times of one micro-batch's forward plus backward, in ms, measured or predicted. `head`
    includes the loss; `attention` and `feed_forward` are the halves of one block.
    """

    embedding: float
    attention: float
    feed_forward: float
    head: float

    def of(self, num_layers: int) -> list[float]:
        """Returns the time of each part of a network with `num_layers` blocks."""
        return [self.embedding, *[self.attention, self.feed_forward] * num_layers, self.head]


def num_parts(num_layers: int) -> int:
    """Returns the number of parts of a network with `num_layers` blocks."""
    return 2 * num_layers + 2


def num_blocks(num_parts: int) -> int:
    """Returns the fewest blocks of a network with at least `num_parts` parts."""
    return max(1, (num_parts - 1) // 2)


def parts_of(blocks: range, num_layers: int) -> range:
    """Returns the parts of a stage of whole blocks. The first stage includes the embeddings, the
    last one the head.
    """
    first = 2 * blocks.start + (blocks.start > 0)
    return range(first, 2 * blocks.stop + 1 + (blocks.stop == num_layers))


def halves_of(parts: range, num_layers: int) -> dict[int, tuple[str, ...]]:
    """Returns which halves of each block are among the parts, by block number."""
    inside = range(max(1, parts.start), min(parts.stop, num_parts(num_layers) - 1))
    halves: dict[int, tuple[str, ...]] = {}
    for block, half in (divmod(part - 1, 2) for part in inside):
        halves[block] = (*halves.get(block, ()), HALVES[half])
    return halves


def cut_blocks(
    model: ModelSpec | BertSpec, schedule: Schedule, times: PartTimes | None = None
) -> list[range]:
    """Returns the blocks of each stage, never half ones, such that ranks have about equal times, or
    equal FLOPs without `times`. The first stage also has the embedding, the last one the head.

    Raises ValueError if the network has fewer blocks than stages.
    """
    stages, layers = schedule.num_stages, model.num_layers
    if stages > layers:
        raise ValueError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {stages} stages; the network has "
            f"{layers} blocks, and each stage needs a whole one: choose num_layers {stages} or fewer "
            f"ranks"
        )
    return _cut(block_weights(model, times), schedule)


def block_weights(model: ModelSpec | BertSpec, times: PartTimes | None = None) -> list[float]:
    """Returns the time, or the FLOPs, of each block. The first block includes the embedding, the
    last one the head.
    """
    first, *halves, last = times.of(model.num_layers) if times else part_flops(model)
    weights = [sum(halves[n : n + 2]) for n in range(0, len(halves), 2)]
    weights[0] += first
    weights[-1] += last
    return weights


def cut_parts(weights: Sequence[float], schedule: Schedule, *, overweight: int = 0) -> list[range]:
    """Returns the parts of each stage such that ranks have about equal weights.

    weights     weight of each part, from PartTimes or part_flops
    overweight  blocks that the second stage gets beyond its share
    """
    return _cut(weights, schedule, extra=len(HALVES) * overweight)


def _cut(weights: Sequence[float], schedule: Schedule, extra: int = 0) -> list[range]:
    return cut_at(balance(weights, list(schedule.rank_of.values())), extra)


def cut_at(sizes: Sequence[int], extra: int = 0) -> list[range]:
    """Returns consecutive ranges of these sizes. The second one is longer by `extra`."""
    second = min(1, len(sizes) - 1)
    lengths = [size + extra * (number == second) for number, size in enumerate(sizes)]
    borders = [0, *itertools.accumulate(lengths)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]


def describe_balance(cuts: Sequence[range], unit: str, *, balance: str, times: str) -> str:
    """Describes stages cut by time, such as "stages of 5, 3 blocks, by measured time"; "" for other
    stages.

    times  "measured" or "predicted"
    """
    if balance not in BY_TIMES:
        return ""
    step = "for the shortest step " if balance == STEP else ""
    sizes = ", ".join(str(len(cut)) for cut in cuts)
    return f"stages of {sizes} {unit}, {step}by {times} time"


def part_flops(model: ModelSpec | BertSpec) -> list[float]:
    """Returns the forward FLOPs of each part for one sequence. An embedding lookup counts as 0."""
    length, d = model.context_length, model.d_model
    head = 2.0 * length * d * model.vocab_size
    block = (float(model.forward_flops(batch=1, sequence=length)) - head) / model.num_layers
    up = 2 if isinstance(model, ModelSpec) and model.is_gated else 1
    feed_forward = min(block, 2.0 * length * (up + 1) * d * model.d_ff)
    return [0.0, *[block - feed_forward, feed_forward] * model.num_layers, head]
