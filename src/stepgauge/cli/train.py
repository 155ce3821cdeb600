"""`stepgauge train`: a real training run, that can be killed and goes on."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import progress, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Out, RunFailedError
from stepgauge.report.numbers import number
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.spec.train import TrainSpec

SAVING_S = 3600.0  # ranks wait for the one that writes a checkpoint


@spec_options(
    TrainSpec, ModelSpec, defaults={"size": "mini", "context_length": 256, "device": "auto"}
)
def train(
    *,
    values: Values,
    out: Annotated[Out, Parameter(help="Folder of the run: curve, checkpoints, records.")] = Path(
        "runs/train"
    ),
) -> None:
    """Train a preset on real text and show that the loss falls.

    Killed at any moment and started again with the same command, it goes on from the last whole
    checkpoint. The vocabulary is the tokenizer's: 256 for bytes, --vocab-size for a BPE. With
    --ranks, or as the processes of torchrun, each rank takes its share of every batch; another
    number of ranks or another wrapper may go on with the run.
    """
    from stepgauge.bench.ranks import is_first_process
    from stepgauge.measure.devices import resolve
    from stepgauge.runtime.launch import RankError, launch

    if "vocab_size" in values and values.get("tokenizer", ("bytes",)) == ("bytes",):
        raise ValueError(
            "vocab_size is the tokenizer's, 256 for bytes; --tokenizer bpe takes another"
        )
    named = {**values, "device": tuple(str(resolve(str(name))) for name in values["device"])}
    (spec,) = expand(TrainSpec, named)
    if "warmup" in values and spec.warmup > spec.steps:
        raise ValueError(
            f"warmup is {spec.warmup} of {spec.steps} steps; choose at most {spec.steps}"
        )
    if spec.ranks == 1:
        print(_train(spec, out))
        return
    try:
        told = launch(
            _train_on_rank, spec, out, ranks=spec.ranks, device=spec.device, timeout_s=SAVING_S
        )[0]
    except RankError as error:
        raise RunFailedError(error.reason or str(error)) from None
    if is_first_process():
        print(told)


def _train_on_rank(spec: TrainSpec, out: Path) -> str:
    """On every rank; rank 0 shows the progress and keeps the record."""
    from stepgauge.bench.ranks import is_first_process

    return _train(spec, out) if is_first_process() else _train_quietly(spec, out)


def _train_quietly(spec: TrainSpec, out: Path) -> str:
    from stepgauge.bench import train as bench_train

    bench_train.run(spec, folder=out)
    return ""


def _train(spec: TrainSpec, out: Path) -> str:
    """Trains with a progress bar, keeps the record, and says in a sentence how it went."""
    from stepgauge.bench import train as bench_train
    from stepgauge.bench.sweep import stamped
    from stepgauge.measure.devices import out_of_memory_reason
    from stepgauge.train.checkpoint import CheckpointError
    from stepgauge.train.loop import DivergedError, Point

    store = RunStore(out)
    with store.held(), progress(spec.steps, "steps") as (bar, task):

        def report(point: Point) -> None:
            bar.update(task, completed=point.step, description=f"loss {point.loss:.3f}")
            if point.bits_per_byte is not None:
                tell(
                    f"step {point.step}: loss {point.loss:.4f}, held-out {point.bits_per_byte:.4f} bits/byte"
                )

        def resumed(step: int) -> None:
            tell(
                f"the run is at its end, step {step}"
                if step == spec.steps
                else f"going on from step {step}"
            )

        try:
            record = bench_train.run(spec, folder=out, report=report, resumed=resumed)
        except (CheckpointError, DivergedError, OSError) as error:
            raise RunFailedError(str(error)) from None
        except (RuntimeError, MemoryError) as error:
            if (reason := out_of_memory_reason(error)) is None:
                raise
            raise RunFailedError(
                f"{reason}; the run goes on from its last checkpoint with the same command"
            ) from None
        if "tokens_per_s" in record.metrics:
            store.append(stamped(record))
    return _told(spec, record, out)


def _told(spec: TrainSpec, record: Record, out: Path) -> str:
    first, last, held_out, rate = (
        record.median(name) for name in ("first_loss", "last_loss", "held_out", "tokens_per_s")
    )
    vocabulary = record.environment["vocab_size"]
    parameters = dataclasses.replace(spec.model, vocab_size=vocabulary).num_parameters
    ranks = f", {spec.ranks} ranks" if spec.ranks > 1 else ""
    # A run that was at its end has no rate of today, and was trained who knows where.
    speed = (
        f" on {record.environment['device']}{ranks}, {number(rate, 'tokens/s')} tokens/s"
        if rate
        else ""
    )
    return (
        f"loss {first:.3f} -> {last:.3f} nats a token (vocabulary {vocabulary:,}), "
        f"held out {held_out:.3f} bits a byte; {parameters:,} parameters{speed}; run in {out}"
    )
