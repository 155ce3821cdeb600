"""Which parts of a network each stage of `bench pipeline` has. A block is two parts, attention and
feed-forward; embeddings and head are a part each.
"""

import itertools

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline.balance import balance


def part_flops(model: ModelSpec | BertSpec) -> list[float]:
    """Forward FLOPs of a token: of the embeddings, of two parts a block, of the head."""
    d, length, is_bert = model.d_model, model.context_length, isinstance(model, BertSpec)
    attention = 8 * d * d + (4 if is_bert else 2) * length * d
    is_gated = isinstance(model, ModelSpec) and model.is_gated
    feed_forward = (6 if is_gated else 4) * d * model.d_ff
    return [0.0, *[float(attention), float(feed_forward)] * model.num_layers,
            2.0 * d * model.vocab_size]  # fmt: skip


def cut(spec: PipelineSpec) -> list[range]:
    """The numbers of the parts that each stage has."""
    flops = part_flops(spec.model)
    inner = [0.0, *[1.0] * (len(flops) - 2), 0.0]
    owners = list(spec.plan().rank_of.values())
    sizes = balance(flops if spec.balance == "flops" else inner, owners)
    sizes[min(1, len(sizes) - 1)] += 2 * spec.overweight  # a block is two parts
    starts = [0, *itertools.accumulate(sizes)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
