"""Which parts of a network each stage of `bench pipeline` has. A block is two parts, attention and
feed-forward; embeddings and head are a part each.
"""

import itertools

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline.balance import balance
from stepgauge.spec.plan.stages import TIME, PartTimes


def part_flops(model: ModelSpec | BertSpec) -> list[float]:
    """Forward FLOPs of a token: of the embeddings, of two parts a block, of the head."""
    d, length, is_bert = model.d_model, model.context_length, isinstance(model, BertSpec)
    attention = 8 * d * d + (4 if is_bert else 2) * length * d
    is_gated = isinstance(model, ModelSpec) and model.is_gated
    feed_forward = (6 if is_gated else 4) * d * model.d_ff
    return [0.0, *[float(attention), float(feed_forward)] * model.num_layers,
            2.0 * d * model.vocab_size]  # fmt: skip


def cut(spec: PipelineSpec, times: PartTimes | None = None) -> list[range]:
    """The numbers of the parts that each stage has.

    times  of embeddings, the two parts of a block, and the head: for a spec balanced by time
    """
    owners = list(spec.plan().rank_of.values())
    sizes = balance(_weights(spec, times), owners)
    sizes[min(1, len(sizes) - 1)] += 2 * spec.overweight  # a block is two parts
    starts = [0, *itertools.accumulate(sizes)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _weights(spec: PipelineSpec, times: PartTimes | None) -> list[float]:
    layers = spec.model.num_layers
    if spec.balance == TIME:
        assert times is not None, "whoever runs or predicts the spec has found them"
        return times.of(layers)
    if spec.balance == "count":
        return [0.0, *[1.0] * (2 * layers), 0.0]
    return part_flops(spec.model)
