"""The training task of a language model on a corpus."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stepgauge.spec.train import BYTES, TrainSpec
from stepgauge.spec.units import NATS_PER_BIT
from stepgauge.train.build import build_step
from stepgauge.train.data import Corpus, read_text
from stepgauge.train.rank_share import SINGLE_PROCESS, RankShare
from stepgauge.train.step import TrainingStep
from stepgauge.train.task import Task


def text_task(
    spec: TrainSpec,
    *,
    place: RankShare = SINGLE_PROCESS,
    build: Callable[..., TrainingStep] = build_step,
) -> Task:
    """Returns the task of training the spec's model on its corpus. Tokens are bytes.

    build  builds the spec's step, given the optimizer's settings

    Raises CorpusError for a corpus that cannot be trained on.
    """
    corpus = Corpus.of(read_text(spec.corpus))
    length = spec.network.context_length
    corpus.require(length=length)
    model = dataclasses.replace(spec.network, vocab_size=BYTES)
    step = build(
        dataclasses.replace(spec, model=model),
        max_gradient_norm=spec.clip or None,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
    return Task(
        step=step,
        micro_batches=lambda number: micro_batches(number, corpus, spec, place, step.device),
        evaluate=lambda: bits_per_byte(step, corpus, spec, place),
        curve_fields={**model.architecture(), "corpus_sha256": corpus.text.sha256},
        environment={
            "corpus_sha256": corpus.text.sha256,
            "corpus_bytes": len(corpus.text.data),
            "vocab_size": BYTES,
            "num_parameters": model.num_parameters,
        },
        loss_unit="nats/token",
        held_out_unit="bits/byte",
        tokens=spec.batch * spec.accumulation * length,
    )


def micro_batches(
    number: int, corpus: Corpus, spec: TrainSpec, place: RankShare, device: torch.device
) -> Iterator[list[Tensor]]:
    """Yields this rank's rows of each micro-batch of a step, on the device."""
    rows, length = spec.batch * spec.accumulation, spec.network.context_length
    batch = corpus.batch(number, batch=rows, length=length, seed=spec.seed)
    shares = (place.shares(part.split(spec.batch)) for part in batch)
    for micro in zip(*shares, strict=True):
        yield [part.to(device, non_blocking=True) for part in micro]


@torch.no_grad()
def bits_per_byte(
    step: TrainingStep, corpus: Corpus, spec: TrainSpec, place: RankShare = SINGLE_PROCESS
) -> float:
    """Returns the held-out loss: nats per token, which is a byte, divided by ln 2."""
    tokens, targets = corpus.held_out_windows(spec.evaluate_windows, spec.network.context_length)
    total = torch.zeros((), dtype=torch.float64)
    for micro in zip(tokens.split(spec.batch), targets.split(spec.batch), strict=True):
        loss = step.evaluate([part.to(step.device) for part in micro])
        total += loss.double().cpu() * len(micro[0])
    if place.ranks > 1:
        total = place.mean(total.to(step.device))
    return total.item() / len(tokens) / NATS_PER_BIT
