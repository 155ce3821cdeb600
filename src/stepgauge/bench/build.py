"""Builds the training step and batch of a spec, for a preset or a user's model, and checks it first."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.parallel.training import Parallelise, single_process
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import BYTES, DEFAULT_CORPUS, TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.data import Corpus, read_text
from stepgauge.train.precision import PRECISIONS, unavailable
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_model import build_user_step, in_type

Spec = WorkSpec | DataParallelSpec
LEARNING_RATE = 1e-4  # small enough that training on random tokens never reaches infinities


def check(spec: WorkSpec) -> None:
    """Raises ValueError if the spec's values cannot be combined; builds nothing."""
    if reason := unavailable(spec.precision, torch.device(spec.device)):
        raise ValueError(reason)
    if isinstance(spec.model, UserModel):
        return
    if spec.data == "text" and isinstance(spec.model, BertSpec):
        raise ValueError("data is 'text', which has no masked tokens; BERT takes 'random'")
    if spec.data == "text" and spec.network.vocab_size < BYTES:
        raise ValueError(
            f"vocab_size is {spec.network.vocab_size}; text as bytes needs at least {BYTES}"
        )


def build(
    spec: Spec,
    device: torch.device,
    *,
    rank: int = 0,
    parallelise: Parallelise = single_process,
    recompute: RecomputePlan | None = None,
    weights: torch.dtype | None = None,
) -> tuple[TrainingStep, Sequence[Any]]:
    """Returns the training step on the device and its batch, for a preset or a user's model.

    rank         of several data ranks, each with its own batch
    parallelise  distributes the model and its optimizer over the ranks
    recompute    replaces the spec's checkpointing
    weights      dtype to which weights and inputs are cast, as ZeRO 3 computes in it
    """
    if isinstance(spec.model, UserModel):
        built = build_user_step(spec, device, spread=lambda _: parallelise, lr=LEARNING_RATE)
        step = built.step
        batch: Sequence[Any] = built.arguments(rank)
    else:
        on_device = dataclasses.replace(spec, device=str(device))
        step = build_step(on_device, parallelise=parallelise, recompute=recompute, lr=LEARNING_RATE)
        batch = make_batch(spec, device, rank)
    if weights is not None:
        step.module.to(weights)
        batch = in_type(batch, weights)
    return step, batch


def make_batch(spec: Spec, device: torch.device, rank: int = 0) -> list[Tensor]:
    """Returns tokens_BT and targets_BT, the tokens shifted by one; for BERT, its loss's arguments."""
    if isinstance(spec, DataParallelSpec) or spec.data == "random":
        batch = batch_for(spec.network, spec.batch, spec.seed + rank)
    else:
        length = spec.network.context_length
        corpus = Corpus.of(read_text(DEFAULT_CORPUS))
        batch = corpus.batch(0, batch=spec.batch, length=length, seed=spec.seed)
    return [part.to(device) for part in batch]


def least_bytes(spec: WorkSpec | TrainSpec) -> int:
    """Returns a lower bound of a step's memory: parameters, and in training also gradients and
    optimizer state. It is 0 for a user's model, which is not built yet.
    """
    if isinstance(spec.model, UserModel):
        return 0
    phases = spec.phases if isinstance(spec, WorkSpec) else "step"
    precision = PRECISIONS[spec.precision]
    bytes_per_parameter = precision.parameters.itemsize * (1 if phases == "forward" else 2)
    if phases == "step":
        bytes_per_parameter += precision.state_bytes(spec.optimizer)
    return bytes_per_parameter * spec.network.num_parameters
