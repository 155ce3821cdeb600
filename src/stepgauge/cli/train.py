"""`stepgauge train`: a real training run, that can be killed and goes on."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import error_console, progress, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Out, RunFailedError, resolve_devices
from stepgauge.report.numbers import number
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.torchrun import is_first_process
from stepgauge.spec.fallbacks import what_ran
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.spec.train import BYTES, DEFAULT_CORPUS, TrainSpec
from stepgauge.spec.units import NATS_PER_BIT
from stepgauge.spec.user_model import UserModel

if TYPE_CHECKING:
    from stepgauge.runtime.launch import RankError

SAVING_S = 3600.0  # ranks wait for the one that writes a checkpoint
QUIET_S = 10.0  # without a bar a step is told when none was for so long


@spec_options(
    TrainSpec, ModelSpec, defaults={"size": "mini", "context_length": 256, "device": "auto"}
)
def train(
    *,
    values: Values,
    out: Annotated[
        Out | None,
        Parameter(
            help="Folder of the run: curve, checkpoints, records. runs/train-SIZE, or with the name "
            "of your own network's file and factory."
        ),
    ] = None,
) -> None:
    """Train a preset on real text, or your own network on its batches, and follow the loss.

    Killed at any moment and started again with the same command, it goes on from the last whole
    checkpoint; with --final-learning-rate 1 it goes on to more --steps, too. Tokens are bytes. With
    --ranks, or as the processes of torchrun, each rank takes its share of every batch; another
    number of ranks or another wrapper may go on with the run. Your own network (--model
    FILE.py:factory) trains on what its factory returns, on the number of ranks that it began with.
    """
    spec = _spec_of(values)
    out = out or _usual_folder(spec)

    from stepgauge.bench import train as bench_train
    from stepgauge.runtime.launch import RankError, launch

    (spec,) = resolve_devices([spec])
    is_own = isinstance(spec.model, UserModel)
    try:
        bench_train.require_memory(spec)
    except MemoryError as error:
        raise RunFailedError(str(error)) from None
    with _interrupted_in_a_sentence(spec, out):
        if spec.ranks == 1 and not is_own:
            print(_train(spec, out))
            return
        try:  # what a user's file does to its process is not done to this one
            told = launch(
                _train_on_rank, spec, out, ranks=spec.ranks, device=spec.device, timeout_s=SAVING_S
            )[0]
        except RankError as error:
            raise RunFailedError(_reason(error, spec)) from None
    if is_first_process():
        print(told)


@contextlib.contextmanager
def _interrupted_in_a_sentence(spec: TrainSpec, out: Path) -> Iterator[None]:
    """An interrupt says where the same command goes on."""
    from stepgauge.train.loop import checkpoints_in

    try:
        yield
    except KeyboardInterrupt as interrupt:
        step = checkpoints_in(out).last_step()
        goes_on = f"the same command goes on from step {step} of {spec.steps}"
        anew = f"before the first checkpoint, of step {spec.checkpoint_every}: it would begin anew"
        raise type(interrupt)(goes_on if step else anew) from None


def _usual_folder(spec: TrainSpec) -> Path:
    model = spec.model
    if isinstance(model, UserModel):
        return Path("runs") / f"train-{Path(model.file).stem}-{model.factory}"
    return Path("runs") / f"train-{spec.size}"


def _spec_of(values: Values) -> TrainSpec:
    """Raises ValueError for options that contradict each other, before torch is loaded."""
    if (tokens := values.get("vocab_size", (BYTES,))) != (BYTES,):
        raise ValueError(f"vocab_size is {tokens[0]}; tokens are bytes, of which there are {BYTES}")
    (spec,) = expand(TrainSpec, values)
    if spec.corpus != DEFAULT_CORPUS and not Path(spec.corpus).exists():
        raise ValueError(f"corpus {spec.corpus} does not exist")
    if "warmup" in values and spec.warmup > spec.steps:
        raise ValueError(
            f"warmup is {spec.warmup} of {spec.steps} steps; choose at most {spec.steps}"
        )
    return spec


def _reason(error: "RankError", spec: TrainSpec) -> str:
    """What a rank failed of, after the line of a user's file that did it."""
    where = ""
    if isinstance(spec.model, UserModel):
        where = user_line(error.trace, Path(spec.model.file))
    return f"{where}: {error.type}: {error.reason}" if where else error.reason or str(error)


def _train_on_rank(spec: TrainSpec, out: Path) -> str:
    """On every rank; rank 0 shows the progress and keeps the record."""
    from stepgauge.bench import train as bench_train

    if is_first_process():
        return _train(spec, out)
    bench_train.run(spec, folder=out)
    return ""


def _train(spec: TrainSpec, out: Path) -> str:
    """Trains with a progress bar, keeps the record, and says in a sentence how it went."""
    from stepgauge.bench import train as bench_train
    from stepgauge.bench.sweep import stamped
    from stepgauge.train.loop import LossPoint

    store = RunStore(out)
    # of text both losses in nats a token, which is a byte; a user's model has a loss of its own
    is_text = not isinstance(spec.model, UserModel)
    unit, scale = (" nats a token", NATS_PER_BIT) if is_text else ("", 1.0)
    with store.held(), progress(spec.steps, "steps") as (bar, task):
        told = 0.0

        def report(point: LossPoint) -> None:
            nonlocal told
            bar.update(task, completed=point.step, description=f"loss {point.loss:.3f}")
            is_quiet = time.monotonic() - told > QUIET_S and not error_console.is_terminal
            held_out = ""
            if point.held_out is not None:
                held_out = f", held out {scale * point.held_out:.4f}"
            if held_out or not told or is_quiet:
                tell(f"step {point.step} of {spec.steps}: loss {point.loss:.4f}{held_out}{unit}")
                told = time.monotonic()

        def resumed(step: int) -> None:
            tell(
                f"the run is at its end, step {step}"
                if step == spec.steps
                else f"going on from step {step}"
            )

        with _failing_in_a_sentence():
            record = bench_train.run(spec, folder=out, report=report, resumed=resumed)
        record = stamped(record)
        if {"tokens_per_s", "steps_per_s"} & record.metrics.keys():
            store.append(record)
    for sentence in what_ran(record):
        tell(sentence)
    return _told(spec, record, out)


@contextlib.contextmanager
def _failing_in_a_sentence() -> Iterator[None]:
    from stepgauge.measure.devices import out_of_memory_reason
    from stepgauge.train.checkpoint import CheckpointError
    from stepgauge.train.loop import DivergedError

    try:
        yield
    except (CheckpointError, DivergedError, OSError) as error:
        raise RunFailedError(str(error)) from None
    except (RuntimeError, MemoryError) as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        raise RunFailedError(
            f"{reason}; the run goes on from its last checkpoint with the same command"
        ) from None


def _told(spec: TrainSpec, record: Record, out: Path) -> str:
    """How the run went, in a sentence."""
    first, last, held_out = (record.median(n) for n in ("first_loss", "last_loss", "held_out"))
    if isinstance(spec.model, UserModel):
        losses = f"loss {number(first)} -> {number(last)}"
        losses += f", held out {number(held_out)}" if held_out is not None else ""
    else:
        vocabulary = record.environment["vocab_size"]
        losses = (
            f"loss {first:.3f} -> {last:.3f} nats a token (vocabulary {vocabulary:,}), held out "
            f"{NATS_PER_BIT * (held_out or 0.0):.3f} ({held_out:.3f} bits a byte)"
        )
    ranks = f", {spec.ranks} ranks" if spec.ranks > 1 else ""
    # A run that was at its end has no rate of today: another machine may have trained it.
    rates = [n for n in ("tokens_per_s", "steps_per_s") if n in record.metrics]
    speed = "".join(
        f" on {record.environment['device']}{ranks}, {number(sample.median)} {sample.unit}"
        for sample in (record.metrics[name] for name in rates)
    )
    parameters = record.environment["num_parameters"]
    return f"{losses}; {parameters:,} parameters{speed}; run in {out}"
