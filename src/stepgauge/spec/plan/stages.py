"""Which blocks of a network each stage of a pipeline has."""

import itertools

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline.action import Schedule
from stepgauge.spec.plan.pipeline.balance import balance


def cut_blocks(model: ModelSpec | BertSpec, schedule: Schedule) -> list[range]:
    """The blocks of each stage, whole ones, such that the ranks have about equal FLOPs. The first
    stage has the embedding too, the last one the head.

    Raises ValueError for a network of fewer blocks than stages.
    """
    stages, layers = schedule.num_stages, model.num_layers
    if stages > layers:
        raise ValueError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {stages} stages; the network has "
            f"{layers} blocks"
        )
    head = 2.0 * model.context_length * model.d_model * model.vocab_size
    whole = float(model.forward_flops(batch=1, sequence=model.context_length))
    weights = [(whole - head) / layers] * layers
    weights[-1] += head
    sizes = balance(weights, list(schedule.rank_of.values()))
    borders = [0, *itertools.accumulate(sizes)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]
