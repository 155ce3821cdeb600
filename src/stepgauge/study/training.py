"""The main job on real input: a small model trained on real text."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from stepgauge.bench import train
from stepgauge.bench.sweep import Job
from stepgauge.report.figure import lines
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import record_table
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.train import TrainSpec
from stepgauge.study.experiment import Experiment, Machine


def specs(machine: Machine, folder: Path) -> Sequence[Job]:
    if machine.is_gpu:
        size, context = "small", 512
        spec = TrainSpec(
            model=_bytes(size, context), size=size, batch=16, steps=600, warmup=50, precision="bf16"
        )
    else:
        size, context = "tiny", 128
        spec = TrainSpec(model=_bytes(size, context), size=size, batch=8, steps=200, warmup=20)
    spec = dataclasses.replace(spec, device=machine.device, checkpoint_every=spec.steps // 2)
    return [Job(functools.partial(train.run, folder=folder / "training"), spec)]


def _bytes(size: str, context: int) -> ModelSpec:
    return ModelSpec.preset(size, context_length=context, vocab_size=256)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    (record,) = records
    if record.status != "ok":
        return [record_table(records)]
    curve = record.series
    is_text = "corpus_bytes" in record.environment  # a user's model has a loss of its own
    training = (curve["step"], curve["loss"])
    trained = lines({"training loss": training}, x="step", y="nats a token" if is_text else "loss")
    plots = [Plot(trained, "Training loss, each step.")]
    series = "held_out_bits_per_byte" if is_text else "held_out_loss"
    if series in curve:
        held_out = {"held out": (curve["held_out_step"], curve[series])}
        unit = "bits a byte" if is_text else "loss"
        drawn = lines(held_out, x="step", y=unit, dots=("held out",), height=2.4)
        plots.append(Plot(drawn, "Held-out loss."))
    return [*([Text(_corpus(record))] if is_text else []), *plots, record_table(records)]


def _corpus(record: Record) -> str:
    where = record.environment
    vocabulary = where.get("vocab_size", 256)
    return (
        f"The corpus has {where['corpus_bytes']:,} bytes (sha256 {where['corpus_sha256'][:16]}…); "
        f"its last 5 % are held out. Guessing one of {vocabulary:,} tokens at random costs "
        f"{number(math.log(vocabulary))} nats a token."
    )


EXPERIMENT = Experiment(
    name="training",
    title="A training run",
    question="Does the step that was timed train? The loss on real text, and on text held out.",
    method=(
        "AdamW with linear warm-up and cosine decay, gradients clipped at norm 1. Each batch is a pure function of the "
        "seed and the step, so that a run that was killed goes on along the same curve. The held-out loss is the mean "
        "over fixed windows, in bits a byte: nats over ln 2 and over the bytes a token stands for."
    ),
    specs=specs,
    blocks=blocks,
)
