"""Which blocks of a network each stage of a pipeline has."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline.action import Schedule
from stepgauge.spec.plan.pipeline.balance import balance

FLOPS, TIME = "flops", "time"


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
