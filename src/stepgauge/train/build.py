"""Builds a training step from a spec's names of model, precision, optimizer and compile mode."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepgauge.models.bert import BertForMaskedLM
from stepgauge.models.checkpointing import Through, by_plan, through_blocks
from stepgauge.models.parts import build_optimizer
from stepgauge.models.transformer import TransformerLM, compiled
from stepgauge.parallel.training import Groups, OptimizerClass, Parallelise, single_process
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.train.data import masked_batch, random_batch
from stepgauge.train.precision import Precision, precision_on
from stepgauge.train.step import TrainingStep

# Network spec -> its module, and a function (vocab_size, batch, length, seed) that makes a random
# batch for it.
NETWORKS: Mapping[type, tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]]]] = {
    ModelSpec: (TransformerLM, random_batch),
    BertSpec: (BertForMaskedLM, masked_batch),
}

WEIGHT_DECAY = 0.01  # the default for matrices


def batch_for(model: ModelSpec | BertSpec, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Returns a batch of random sequences with the inputs that the network needs for its loss."""
    _, make = NETWORKS[type(model)]
    return make(model.vocab_size, batch, model.context_length, seed)


def build_step(
    spec: WorkSpec | TrainSpec | DataParallelSpec | LayoutSpec,
    *,
    max_gradient_norm: float | None = None,
    parallelise: Parallelise = single_process,
    recompute: RecomputePlan | None = None,
    **optimizer_settings: Any,
) -> TrainingStep:
    """Returns the spec's training step on its device, with weights drawn from its seed.

    parallelise  distributes the model and its optimizer over ranks
    recompute    which blocks backward recomputes, instead of the spec's checkpointing

    Raises ValueError for a precision that the device or the optimizer does not support.
    """
    device = torch.device(spec.device)
    precision = precision_on(spec.precision, device)
    torch.manual_seed(spec.seed)
    network, _ = NETWORKS[type(spec.model)]
    model = precision.of(network(spec.model, device=device))
    model.through_blocks = blocks_runner(spec, recompute)
    groups, optimizer = optimizer_of(spec.optimizer, precision, **optimizer_settings)
    parallel = parallelise(compiled(model, spec.compile), groups, optimizer)
    return TrainingStep(
        model,
        parallel.optimizer,
        precision,
        device,
        max_gradient_norm=max_gradient_norm,
        parallel=parallel,
    )


def blocks_runner(
    spec: WorkSpec | TrainSpec | DataParallelSpec | LayoutSpec, recompute: RecomputePlan | None
) -> Through:
    """Returns the function that runs a model's blocks, with checkpointing as the recompute plan or
    else the spec says.
    """
    by_block = spec.compile == "blocks"
    if recompute:
        return functools.partial(by_plan, plan=recompute, compiled_blocks=by_block)
    return through_blocks(spec.checkpointing, spec.checkpoint_blocks, compiled_blocks=by_block)


def optimizer_of(
    name: str, precision: Precision, *, weight_decay: float = WEIGHT_DECAY, **settings: Any
) -> tuple[Groups, OptimizerClass]:
    """Returns a function that groups a module's parameters, and one that builds the optimizer."""
    masters = precision.master_weights
    return (
        functools.partial(decay_groups, weight_decay=weight_decay),
        functools.partial(build_optimizer, name, master_weights=masters, **settings),
    )


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups of the trainable parameters: matrices with weight decay, and gains and
    biases without.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
