"""Which parts of a network each stage of a pipeline has.

Parts are numbered through: the embeddings, two of each block (attention, feed-forward), the head.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline.action import Schedule
from stepgauge.spec.plan.pipeline.balance import balance

FLOPS, TIME, STEP = "flops", "time", "step"
BY_TIMES = (TIME, STEP)  # what parts take, measured or predicted
HALVES = ("attention", "feed_forward")


class PartTimes(NamedTuple):
    """ms of forward and backward of a micro-batch, measured or predicted: of the embeddings, of the
    halves of a block, of the head with the loss.
    """

    embedding: float
    attention: float
    feed_forward: float
    head: float

    def of(self, num_layers: int) -> list[float]:
        """A value for each part of a network of so many blocks."""
        return [self.embedding, *[self.attention, self.feed_forward] * num_layers, self.head]


def num_parts(num_layers: int) -> int:
    """Of a network of so many blocks."""
    return 2 * num_layers + 2


def parts_of(blocks: range, num_layers: int) -> range:
    """The parts of a stage of whole blocks, the first with the embeddings, the last with the head."""
    first = 2 * blocks.start + (blocks.start > 0)
    return range(first, 2 * blocks.stop + 1 + (blocks.stop == num_layers))


def halves_of(parts: range, num_layers: int) -> dict[int, tuple[str, ...]]:
    """What of each block is among the parts, by the block's number."""
    inside = range(max(1, parts.start), min(parts.stop, num_parts(num_layers) - 1))
    found: dict[int, tuple[str, ...]] = {}
    for block, half in (divmod(part - 1, 2) for part in inside):
        found[block] = (*found.get(block, ()), HALVES[half])
    return found


def cut_blocks(
    model: ModelSpec | BertSpec, schedule: Schedule, times: PartTimes | None = None
) -> list[range]:
    """The blocks of each stage, whole ones, such that the ranks have about equal times, or FLOPs
    where times are not given. The first stage has the embedding too, the last one the head.

    Raises ValueError for a network of fewer blocks than stages.
    """
    stages, layers = schedule.num_stages, model.num_layers
    if stages > layers:
        raise ValueError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {stages} stages; the network has "
            f"{layers} blocks"
        )
    return _cut(block_weights(model, times), schedule)


def block_weights(model: ModelSpec | BertSpec, times: PartTimes | None = None) -> list[float]:
    """Time, or FLOPs, of each block, with the embedding's in the first and the head's in the last."""
    first, *halves, last = times.of(model.num_layers) if times else part_flops(model)
    weights = [sum(halves[n : n + 2]) for n in range(0, len(halves), 2)]
    weights[0] += first
    weights[-1] += last
    return weights


def cut_parts(weights: Sequence[float], schedule: Schedule, *, overweight: int = 0) -> list[range]:
    """The parts of each stage, by what each part weighs: of PartTimes, or part_flops. The second
    stage has `overweight` blocks more than its share.
    """
    return _cut(weights, schedule, more=len(HALVES) * overweight)


def _cut(weights: Sequence[float], schedule: Schedule, more: int = 0) -> list[range]:
    return cut_at(balance(weights, list(schedule.rank_of.values())), more)


def cut_at(sizes: Sequence[int], more: int = 0) -> list[range]:
    """Stages of these sizes, the second one larger."""
    second = min(1, len(sizes) - 1)
    own = [size + more * (place == second) for place, size in enumerate(sizes)]
    borders = [0, *itertools.accumulate(own)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]


def describe_cuts(cuts: Sequence[range], unit: str) -> str:
    """How a row names its stages, such as "stages of 5, 3 blocks"."""
    return f"stages of {', '.join(str(len(cut)) for cut in cuts)} {unit}"


def describe_balance(cuts: Sequence[range], unit: str, *, balance: str, times: str) -> str:
    """How a row names stages that are cut by what parts take; `times` are measured or predicted."""
    if balance not in BY_TIMES:
        return ""
    step = "for the shortest step " if balance == STEP else ""
    return f"{describe_cuts(cuts, unit)}, {step}by {times} time"


def part_flops(model: ModelSpec | BertSpec) -> list[float]:
    """Forward FLOPs of each part for a sequence. Embeddings are looked up."""
    length, d = model.context_length, model.d_model
    head = 2.0 * length * d * model.vocab_size
    block = (float(model.forward_flops(batch=1, sequence=length)) - head) / model.num_layers
    up = 2 if isinstance(model, ModelSpec) and model.is_gated else 1
    feed_forward = min(block, 2.0 * length * (up + 1) * d * model.d_ff)
    return [0.0, *[block - feed_forward, feed_forward] * model.num_layers, head]
