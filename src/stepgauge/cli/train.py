"""`stepgauge train`: a real training run, that can be killed and goes on."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.bench import Out, RunFailedError, resolve_devices
from stepgauge.cli.console import progress, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.store import RunStore
from stepgauge.spec.train import TrainSpec


@spec_options(
    TrainSpec, ModelSpec, defaults={"size": "mini", "context_length": 256, "vocab_size": 4096, "device": "auto"}
)
def train(
    *,
    values: Values,
    out: Annotated[Out, Parameter(help="Folder of the run: curve, checkpoints, records.")] = Path("runs/train"),
) -> None:
    """Train a preset on real text and show that the loss falls.

    Killed at any moment and started again with the same command, it goes on from the last whole checkpoint. The
    vocabulary is the tokenizer's: 256 for bytes, --vocab-size for a BPE.
    """
    from stepgauge.bench import train as bench_train
    from stepgauge.bench.sweep import stamped
    from stepgauge.train.checkpoint import CheckpointError
    from stepgauge.train.loop import DivergedError, Point

    (spec,) = resolve_devices(expand(TrainSpec, values))
    store = RunStore(out)
    store.prepare()
    with progress(spec.steps, "steps") as (bar, task):

        def report(point: Point) -> None:
            bar.update(task, completed=point.step, description=f"loss {point.loss:.3f}")
            if point.bits_per_byte is not None:
                tell(f"step {point.step}: loss {point.loss:.4f}, held-out {point.bits_per_byte:.4f} bits/byte")

        try:
            record = bench_train.run(spec, folder=out, report=report)
        except (CheckpointError, DivergedError, OSError) as error:
            raise RunFailedError(str(error)) from None
    store.append(stamped(record))
    first, last, held_out = (record.median(name) for name in ("first_loss", "last_loss", "held_out"))
    print(f"loss {first:.3f} -> {last:.3f} nats a token, held out {held_out:.3f} bits a byte; run in {out}")
