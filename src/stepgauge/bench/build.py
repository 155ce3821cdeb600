"""A spec's step and batch, of a preset or of a user's model, and what is asked before they are built."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import BYTES, DEFAULT_CORPUS, TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.data import Corpus, read_text
from stepgauge.train.precision import PRECISIONS, unavailable
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_model import build_user_step, in_type

LEARNING_RATE = 1e-4  # small enough that random tokens never drive a timed model to infinities


def check(spec: WorkSpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    reason = unavailable(spec.precision, torch.device(spec.device))
    if reason:
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
    spec: WorkSpec,
    device: torch.device,
    *,
    recompute: RecomputePlan | None = None,
    weights: torch.dtype | None = None,
) -> tuple[TrainingStep, Sequence[Any]]:
    """The step on the device and its batch, of a preset or of a user's model; `recompute` in place
    of the spec's checkpointing. `weights`: another type of these and of inputs, as ZeRO 3 computes.
    """
    if isinstance(spec.model, UserModel):
        built = build_user_step(spec, device, lr=LEARNING_RATE)
        step = built.step
        batch: Sequence[Any] = built.arguments(0)
    else:
        on_device = dataclasses.replace(spec, device=str(device))
        step = build_step(on_device, lr=LEARNING_RATE, recompute=recompute)
        batch = make_batch(spec, device)
    if weights is not None:
        step.module.to(weights)
        batch = in_type(batch, weights)
    return step, batch


def make_batch(spec: WorkSpec, device: torch.device) -> list[Tensor]:
    """tokens_BT and targets_BT, the targets one position on; of BERT as its loss takes them."""
    if spec.data == "random":
        batch = batch_for(spec.network, spec.batch, spec.seed)
    else:
        length = spec.network.context_length
        corpus = Corpus.of(read_text(DEFAULT_CORPUS))
        batch = corpus.batch(0, batch=spec.batch, length=length, seed=spec.seed)
    return [part.to(device) for part in batch]


def least_bytes(spec: WorkSpec | TrainSpec) -> int:
    """Parameters, and where they are trained gradients and optimizer state too: no step can do with
    less. Nothing of a user's model, which is not built yet.
    """
    if isinstance(spec.model, UserModel):
        return 0
    phases = spec.phases if isinstance(spec, WorkSpec) else "step"
    precision = PRECISIONS[spec.precision]
    each = precision.parameters.itemsize * (1 if phases == "forward" else 2)
    if phases == "step":
        each += precision.state_bytes(spec.optimizer)
    return each * spec.network.num_parameters
