"""Builds the stages of `bench pipeline` from parts of a network. The loss is not part of the last
stage: torch's pipelines need it separate, and so the head is a layer like others, whose W action can
be delayed.
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
    """Returns the mean loss over the targets that count; for BERT, those of masked tokens."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=NOT_MASKED)


def build_stage(
    spec: PipelineSpec, model: ModelSpec | BertSpec, parts: range, *, device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:  # fmt: skip
    """Builds a stage with these parts of the network. The parts of a block are compiled together."""
    make, _ = NETWORKS[type(model)]
    return compiled(make(model, device=device, parts=parts, seed=spec.seed).to(dtype), spec.compile)


def heavier(spec: PipelineSpec) -> ModelSpec | BertSpec:
    """Returns the network with `overweight` more blocks, which all go to one stage."""
    return dataclasses.replace(spec.model, num_layers=spec.model.num_layers + spec.overweight)


def times_of(
    spec: PipelineSpec, *, device: torch.device, dtype: torch.dtype, context: Context
) -> PartTimes:
    """Measures the times of the network's parts, by which stages are cut. All ranks must call it; all
    get the same times.
    """
    batch = batch_for(spec.model, spec.micro_batch, spec.seed)
    tokens, targets, *_ = (part.to(device) for part in batch)

    def build(model: ModelSpec | BertSpec, parts: range) -> Callable[..., Tensor]:
        stage = build_stage(spec, model, parts, device=device, dtype=dtype)

        def run(inputs: Tensor, targets_BT: Tensor | None = None) -> Tensor:
            output = stage(inputs)
            return output if targets_BT is None else mean_loss(output, targets_BT)

        return run

    return part_times(
        spec.model, build, inputs=(tokens,), targets=targets, device=device, context=context
    )
