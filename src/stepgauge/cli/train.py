"""`stepgauge train`: a real training run that can be killed and resumed."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import counted, has_bars, info, progress
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Out, RunFailedError, resolve_devices_and_models
from stepgauge.report.numbers import number
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.torchrun import is_first_process
from stepgauge.spec.fallbacks import what_ran
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.spec.train import BYTES, DEFAULT_CORPUS, TrainSpec, layout_of
from stepgauge.spec.units import NATS_PER_BIT
from stepgauge.spec.user_model import UserModel

if TYPE_CHECKING:
    from stepgauge.runtime.launch import RankError

TIMEOUT_S = 3600.0  # long, because ranks wait for the one that writes a checkpoint
QUIET_S = 10.0  # without a progress bar, a step is printed at least this often


@spec_options(
    TrainSpec, ModelSpec, defaults={"size": "mini", "context_length": 256, "device": "auto"}
)
def train(
    *,
    values: Values,
    out: Annotated[
        Out | None,
        Parameter(
            help="Folder for loss curve, checkpoints and records. [runs/train-SIZE, or "
            "runs/train-FILE-FACTORY for your own network]"
        ),
    ] = None,
) -> None:
    """Train a preset on real text, or your own network on its own batches, and follow the loss.

    The run can be killed at any moment: the same command resumes from the last complete checkpoint.
    One that you interrupt leaves a record of the steps until then.
    With --final-learning-rate 1 it can also be resumed with more --steps. Tokens are bytes. With
    --ranks or under torchrun each rank takes its share of every batch; a run may be resumed with
    another number of ranks or another wrapper. Your own network (--model FILE.py:factory) trains on
    the batches of its factory, and must be resumed with the same number of ranks.
    """
    spec = _spec_of(values)
    out = out or _default_folder(spec)

    from stepgauge.bench import train as bench_train
    from stepgauge.runtime.launch import RankError, launch

    (spec,) = resolve_devices_and_models([spec])
    try:
        bench_train.require_memory(spec)
    except MemoryError as error:
        raise RunFailedError(str(error)) from None
    _keep_unfinished(out)  # of a run that was killed
    with _report_interruption(spec, out):
        if spec.ranks == 1 and spec.is_text:
            print(_train(spec, out))
            return
        try:  # a user's file runs in a separate process, which it may end or change
            summary = launch(
                _train_on_rank, spec, out, ranks=spec.ranks, device=spec.device, timeout_s=TIMEOUT_S
            )[0]
        except RankError as error:
            raise RunFailedError(_reason(error, spec)) from None
    if is_first_process():
        print(summary)


@contextlib.contextmanager
def _report_interruption(spec: TrainSpec, out: Path) -> Iterator[None]:
    """Saves a record of the steps so far if the run stops early. Adds to an interrupt how many are
    saved, and the step from which the same command resumes.
    """
    from stepgauge.train.loop import checkpoints_in

    try:
        yield
    except RunFailedError:
        _keep_unfinished(out)
        raise
    except KeyboardInterrupt as interrupt:
        kept = _keep_unfinished(out)
        step = checkpoints_in(out).last_step()
        resumes = f"the same command resumes from step {step} of {spec.steps}"
        restarts = (
            f"there is no checkpoint before step {spec.checkpoint_every}; the same command starts "
            "from the beginning"
        )
        raise type(interrupt)(kept + (resumes if step else restarts)) from None


def _keep_unfinished(out: Path) -> str:
    """Saves the record of a run in the folder that stopped early. Returns the beginning of a sentence on
    it, or "" if there is none.
    """
    from stepgauge.bench import train as bench_train
    from stepgauge.bench.sweep import stamped

    path, store = out / bench_train.UNFINISHED, RunStore(out)
    if not is_first_process() or not path.exists():
        return ""
    with store.held():  # not the run of another process
        record = bench_train.unfinished(out)
        if record:
            store.append(stamped(record))
        path.unlink(missing_ok=True)
    if not record:
        return ""
    return f"the loss of {counted(len(record.series['step']), 'step')} is in {out}; "


def _default_folder(spec: TrainSpec) -> Path:
    model = spec.model
    if isinstance(model, UserModel):
        return Path("runs") / f"train-{Path(model.file).stem}-{model.factory}"
    return Path("runs") / f"train-{spec.size}"


def _spec_of(values: Values) -> TrainSpec:
    """Returns the options as a spec. Raises ValueError for wrong ones before torch is imported."""
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
    """Returns why a rank failed, with the line of the user's file if its code raised the error."""
    line = user_line(error.trace, spec.model)
    return f"{line}: {error.type}: {error.reason}" if line else error.reason or str(error)


def _train_on_rank(spec: TrainSpec, out: Path) -> str:
    """Trains on one of several ranks. Rank 0 shows progress, saves the record and returns the
    summary.
    """
    from stepgauge.bench import train as bench_train

    if is_first_process():
        return _train(spec, out)
    bench_train.run(spec, folder=out)
    return ""


def _train(spec: TrainSpec, out: Path) -> str:
    """Trains with a progress bar, saves the record, and returns a sentence on the result."""
    from stepgauge.bench import train as bench_train
    from stepgauge.bench.sweep import stamped
    from stepgauge.train.loop import LossPoint

    store = RunStore(out)
    # The held-out loss of text is in bits a byte. A token is a byte, so both print as nats a token.
    unit, scale = (" nats a token", NATS_PER_BIT) if spec.is_text else ("", 1.0)
    with store.held(), progress(spec.steps, "steps") as (bar, task):
        last_printed = 0.0

        def report(point: LossPoint) -> None:
            nonlocal last_printed
            bar.update(task, completed=point.step, description=f"loss {point.loss:.3f}")
            is_quiet = time.monotonic() - last_printed > QUIET_S and not has_bars()
            held_out = ""
            if point.held_out is not None:
                held_out = f", held out {scale * point.held_out:.4f}"
            if held_out or not last_printed or is_quiet:
                info(f"step {point.step} of {spec.steps}: loss {point.loss:.4f}{held_out}{unit}")
                last_printed = time.monotonic()

        def resumed(step: int) -> None:
            is_complete = step == spec.steps
            info(_complete(spec, store) if is_complete else f"resuming from step {step}")

        with _errors_as_sentences():
            record = bench_train.run(spec, folder=out, report=report, resumed=resumed, note=info)
        record = stamped(record)
        if {"tokens_per_s", "steps_per_s"} & record.metrics.keys():
            store.append(record)
        (out / bench_train.UNFINISHED).unlink(missing_ok=True)
    for sentence in what_ran(record):
        info(sentence)
    return _summary(spec, record, out)


def _complete(spec: TrainSpec, store: RunStore) -> str:
    """Returns a sentence on a run that ended earlier, with its layout if another one is asked for."""
    sentence = f"the run is already complete, at step {spec.steps}"
    trained = [record for record in store.read().records if record.kind == spec.kind]
    before, wanted = [str(layout_of(each.spec)) for each in trained[-1:]], str(spec.parsed_layout)
    if before in ([], [wanted]):
        return sentence
    return (
        f"{sentence}: it was trained under layout {before[0]!r}; to train under {wanted!r}, start another "
        "run with --out FOLDER"
    )


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Raises RunFailedError for errors that training is expected to have."""
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
            f"{reason}; the same command resumes from the last checkpoint"
        ) from None


def _summary(spec: TrainSpec, record: Record, out: Path) -> str:
    """Returns a sentence with the losses, the model's size and the speed."""
    first, last, held_out = (record.median(n) for n in ("first_loss", "last_loss", "held_out"))
    if spec.is_text:
        vocabulary = record.environment["vocab_size"]
        losses = (
            f"loss {first:.3f} -> {last:.3f} nats a token (vocabulary {vocabulary:,}), held out "
            f"{NATS_PER_BIT * (held_out or 0.0):.3f} ({held_out:.3f} bits a byte)"
        )
    else:
        losses = f"loss {number(first)} -> {number(last)}"
        losses += f", held out {number(held_out)}" if held_out is not None else ""
    ranks = f", {spec.ranks} ranks" if spec.ranks > 1 else ""
    # A run that was already complete has no speed, because another machine may have trained it.
    rates = [record.metrics[n] for n in ("tokens_per_s", "steps_per_s") if n in record.metrics]
    speed = "".join(
        f" on {record.environment['device']}{ranks}, {number(rate.median)} {rate.unit}"
        for rate in rates
    )
    parameters = record.environment["num_parameters"]
    return f"{losses}; {parameters:,} parameters{speed}; run in {out}"
