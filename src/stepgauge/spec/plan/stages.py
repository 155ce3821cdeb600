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

FLOPS, TIME = "flops", "time"
HALVES = ("attention", "feed_forward")


class PartTimes(NamedTuple):
    """ms of forward and backward of a micro-batch, measured or predicted: of the embeddings, of the
    parts of a block (one: the whole block), of the head with the loss.
    """

    embedding: float
    block: tuple[float, ...]
    head: float

    def of(self, num_layers: int) -> list[float]:
        """A value for each part of a network of so many blocks."""
        return [self.embedding, *self.block * num_layers, self.head]


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
    weights = [sum(times.block)] * layers if times else [_block_flops(model)] * layers
    weights[0] += times.embedding if times else 0.0
    weights[-1] += times.head if times else _head_flops(model)
    sizes = balance(weights, list(schedule.rank_of.values()))
    borders = [0, *itertools.accumulate(sizes)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]


def said(cuts: Sequence[range], unit: str) -> str:
    """How a row names its stages, such as "stages of 5, 3 blocks"."""
    return f"stages of {', '.join(str(len(cut)) for cut in cuts)} {unit}"


def _head_flops(model: ModelSpec | BertSpec) -> float:
    return 2.0 * model.context_length * model.d_model * model.vocab_size


def _block_flops(model: ModelSpec | BertSpec) -> float:
    whole = float(model.forward_flops(batch=1, sequence=model.context_length))
    return (whole - _head_flops(model)) / model.num_layers
