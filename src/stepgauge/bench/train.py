"""A TrainSpec run to its end: `run` gives its record, with the loss curve as series."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stepgauge.bench.launchers import prepare_for
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.runtime.world import joined_world
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.train import TrainSpec
from stepgauge.train.data import Corpus
from stepgauge.train.loop import Point, Trainer, load_corpus
from stepgauge.train.place import Place
from stepgauge.train.precision import PRECISIONS, REDUCE_DTYPES


def run(
    spec: TrainSpec,
    *,
    folder: Path,
    report: Callable[[Point], None] = lambda point: None,
    resumed: Callable[[int], None] = lambda step: None,
) -> Record:
    """Trains in the folder, from its newest checkpoint if it has one. A run that was at its end
    gives no rate.

    Of several ranks, every one must call it, and each gives the record of its own share's time and
    memory.

    Raises CorpusError, CheckpointError, DivergedError.
    """
    prepare_for(spec)
    corpus, full = load_corpus(spec)
    trainer = _trainer(full, corpus, folder)
    devices.reset_peak_memory(trainer.device)
    start = time.perf_counter()
    curve, trained = trainer.run(report, resumed)
    seconds = time.perf_counter() - start
    metrics, series = _losses(curve)
    if trained:
        metrics["tokens_per_s"] = Sample.exact(trained * full.tokens_per_step / seconds, "tokens/s")
    peaks = devices.peak_memory(trainer.device)
    metrics |= {name: Sample.exact(value, "bytes") for name, value in peaks.items()}
    return Record(
        kind=spec.kind,
        # as asked, so that asking again finds the record: what the corpus made of it is beside
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        series=series,
        environment={
            **environment(torch.device(spec.device)),
            "corpus_sha256": corpus.text.sha256,
            "corpus_bytes": len(corpus.text.data),
            "vocab_size": corpus.vocab_size,
        },
    )


def _losses(curve: Sequence[Point]) -> tuple[dict[str, Sample], dict[str, list[float]]]:
    """The curve's ends as metrics, and the curve as series."""
    evaluated = [point for point in curve if point.bits_per_byte is not None]
    metrics = {
        "first_loss": Sample.exact(curve[0].loss, "nats/token"),
        "last_loss": Sample.exact(curve[-1].loss, "nats/token"),
        "held_out": Sample.exact(evaluated[-1].bits_per_byte or 0.0, "bits/byte"),
    }
    series: dict[str, list[float]] = {
        "step": [point.step for point in curve],
        "loss": [point.loss for point in curve],
        "held_out_step": [point.step for point in evaluated],
        "held_out_bits_per_byte": [point.bits_per_byte or 0.0 for point in evaluated],
    }
    return metrics, series


def _trainer(spec: TrainSpec, corpus: Corpus, folder: Path) -> Trainer:
    """This process's: of a run of one, or of its rank."""
    world = joined_world()
    if spec.ranks == 1 or world is None:
        return Trainer(spec, corpus, folder)
    # torch's parts of it take a while to load.
    from stepgauge.parallel.wrappers import Settings, parallelise

    sharded = WRAPPERS[spec.data_parallel].shards("weights")
    settings = Settings(
        bucket_mb=spec.bucket_mb,
        compute_dtype=PRECISIONS[spec.precision].autocast if sharded else None,
        reduce_dtype=REDUCE_DTYPES[spec.reduce_dtype],
    )
    here = dataclasses.replace(spec, device=str(world.device(spec.device)))
    return Trainer(
        here,
        corpus,
        folder,
        place=Place(world.rank, world.size),
        parallelise=functools.partial(parallelise, spec.data_parallel, settings=settings),
    )
