"""The training task of a user's own network and batches."""

from collections.abc import Iterator
from typing import Any

import torch

from stepgauge.spec.train import OPTIMIZER_FIELDS, TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import decay_groups
from stepgauge.train.rank_share import SINGLE_PROCESS, RankShare
from stepgauge.train.task import Task
from stepgauge.train.user_model import (
    SpreadParts,
    UserStep,
    build_parts,
    in_one_process,
    step_of_parts,
)


def user_task(
    spec: TrainSpec, *, place: RankShare = SINGLE_PROCESS, spread: SpreadParts = in_one_process
) -> Task:
    """Returns the task of training the spec's UserModel. Its function `batches` is called with a
    different number for each micro-batch of each data rank; a single `batch` is used in every step.

    Raises ValueError as build_parts does, and for optimizer options if the user's file brings an
    optimizer.
    """
    model, device = spec.model, torch.device(spec.device)
    assert isinstance(model, UserModel), "the corpus trains other networks"
    parts = build_parts(spec, device)
    if parts.optimizer:
        _require_no_settings(spec)
    built = step_of_parts(
        parts,
        device,
        precision=spec.precision,
        optimizer=spec.optimizer,
        compile=spec.compile,
        parallelise=spread(parts),
        max_gradient_norm=spec.clip or None,
        groups=lambda module: decay_groups(module, spec.weight_decay),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
    )
    held_out = parts.held_out
    return Task(
        step=built.step,
        micro_batches=lambda number: micro_batches(number, built, spec, place),
        evaluate=(lambda: mean_held_out(built, held_out, place)) if held_out else None,
        curve_fields={"factory": model.factory, "source": model.content, "ranks": place.data_ranks},
        environment={
            "num_parameters": built.num_parameters,
            "optimizer": built.step.optimizer_name,
        },
        note=_one_batch_note(model) if parts.is_one_batch else "",
    )


def _one_batch_note(model: UserModel) -> str:
    return (
        f"{model.file}:{model.factory} returns 'batch', so that every step trains on this one batch; "
        "return a function 'batches' instead to train on others (docs/api.md)"
    )


def micro_batches(
    number: int, built: UserStep, spec: TrainSpec, place: RankShare
) -> Iterator[tuple[Any]]:
    """Yields this rank's micro-batches of a step."""
    for micro in range(number * spec.accumulation, (number + 1) * spec.accumulation):
        batch_number = micro * place.data_ranks + place.data_rank
        # So that a resumed run draws the same dropout masks as one that was not interrupted.
        torch.manual_seed((spec.seed * 1_000_003 + batch_number) % 2**63)
        yield built.arguments(batch_number)


def _require_no_settings(spec: TrainSpec) -> None:
    """Raises ValueError if the spec changes a setting of the optimizer."""
    for name in OPTIMIZER_FIELDS:
        if getattr(spec, name) != getattr(TrainSpec, name):
            raise ValueError(
                f"{name} is {getattr(spec, name)!r}; the user's model brings an optimizer with its "
                "own settings"
            )


@torch.no_grad()
def mean_held_out(built: UserStep, batches: list[Any], place: RankShare) -> float:
    """Returns the mean loss of the batches, computed in eval mode."""
    training = [module for module in built.step.module.modules() if module.training]
    for module in training:
        module.training = False
    try:
        losses = [built.step.evaluate(built.arguments_of(batch)) for batch in batches]
    finally:
        for module in training:
            module.training = True
    return place.mean(torch.stack(losses).double().mean()).item()
