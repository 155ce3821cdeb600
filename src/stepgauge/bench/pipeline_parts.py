"""The stages of `bench pipeline`: any parts of a network, as the models build them. The loss stands
outside, as torch's pipelines want it: so the head is a layer like others, whose W may wait.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.models.bert import NOT_MASKED
from stepgauge.models.transformer import compiled
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.stages import PartTimes
from stepgauge.train.build import NETWORKS, batch_for
from stepgauge.train.part_times import Context, part_times


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Over the targets that count: BERT's are those of masked tokens."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=NOT_MASKED)


def build_stage(
    spec: PipelineSpec, model: ModelSpec | BertSpec, parts: range, *, device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:  # fmt: skip
    """A stage that has these parts of the network, and nothing else of it. What it has of a block is
    compiled together.
    """
    make, _ = NETWORKS[type(model)]
    return compiled(make(model, device=device, parts=parts, seed=spec.seed).to(dtype), spec.compile)


def heavier(spec: PipelineSpec) -> ModelSpec | BertSpec:
    """The network with the blocks that one stage has more than its share."""
    return dataclasses.replace(spec.model, num_layers=spec.model.num_layers + spec.overweight)


def times_of(
    spec: PipelineSpec, *, device: torch.device, dtype: torch.dtype, context: Context
) -> PartTimes:
    """What `cut_parts` takes. The same on all ranks, which must all call it."""
    batch = batch_for(spec.model, spec.micro_batch, spec.seed)
    tokens, targets, *_ = (part.to(device) for part in batch)

    def build(model: ModelSpec | BertSpec, parts: range) -> Callable[..., Tensor]:
        stage = build_stage(spec, model, parts, device=device, dtype=dtype)
        return lambda *inputs: _with_loss(stage, *inputs)

    return part_times(
        spec.model, build, inputs=(tokens,), targets=targets, device=device, context=context
    )


def _with_loss(stage: nn.Module, inputs: Tensor, targets_BT: Tensor | None = None) -> Tensor:
    output = stage(inputs)
    return output if targets_BT is None else mean_loss(output, targets_BT)
