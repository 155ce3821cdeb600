"""Experiment: training BERT with replicated and with sharded weights."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.merge import merge_over
from stepgauge.report.names import labels
from stepgauge.report.numbers import scaled
from stepgauge.report.page import Block, Text
from stepgauge.report.table import Table
from stepgauge.report.views import record_table, remark, undisturbed
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.record import Record, Sample
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import comparison

MAX_RANKS = 4  # as in S3
SEEDS = (1, 2, 3)
GLOBAL_BATCHES = (64, 16)
# Pairs of wrappers by the same author: one replicates weights, one shards them.
PAIRS = (("torch-ddp", "torch-fsdp"), ("bucketed", "zero3"))
SHOWN = ("samples_per_s", "step_ms", "peak_bytes")
KEPT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
PUBLISHED_NOTE = (
    "S3 used 4 of its GPUs. It does not state sequence length and precision; its GB are 10⁹ bytes"
)


def specs(machine: StudyMachine, folder: Path) -> Sequence[DataParallelSpec]:
    ranks = min(machine.gpus, MAX_RANKS) if machine.is_gpu else 2
    batches = [batch for batch in GLOBAL_BATCHES if batch % ranks == 0] if machine.is_gpu else [4]
    return [
        _spec(machine, wrapper, ranks, batch // ranks, seed)
        for batch in batches
        for pair in PAIRS
        for wrapper in pair
        for seed in SEEDS
    ]


def _spec(
    machine: StudyMachine, wrapper: str, ranks: int, batch: int, seed: int
) -> DataParallelSpec:
    on_gpu = {"device": "cuda", "warmup": 5, "steps": 10}
    on_cpu = {"device": "cpu", "warmup": 1, "steps": 3}
    counts: dict[str, Any] = on_gpu if machine.is_gpu else on_cpu
    shape = (
        {"context_length": 512} if machine.is_gpu else {"context_length": 64, "vocab_size": 1000}
    )
    size = "bert-base" if machine.is_gpu else "bert-tiny"
    return DataParallelSpec(
        model=BertSpec.preset(size, **shape),
        size=size,
        wrapper=wrapper,
        ranks=ranks,
        batch=batch,
        seed=seed,
        **counts,
    ).canonical()


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    rows = over_seeds(records)
    failed = [record for record in records if record.status != "ok"]
    reasons = [
        Text(f"{name}: {remark(r)}.") for name, r in zip(labels(failed), failed, strict=True)
    ]
    if not rows:
        return reasons
    figures = [
        dataclasses.replace(row, metrics={n: row.metrics[n] for n in SHOWN if n in row.metrics})
        for row in rows
    ]
    table = record_table(figures, statistics=("mean", "std"), first=("wrapper", "global_batch"))
    caption = "Throughput and step time: mean and sample std over seeds. Peak memory: over ranks and seeds."
    table = dataclasses.replace(table, caption=f"{caption} {table.caption}")
    return [*reasons, table, gap_table(rows), comparison("ddp-vs-fsdp", rows, PUBLISHED_NOTE)]


def over_seeds(records: Sequence[Record]) -> list[Record]:
    """Merges the seeds of each configuration, and adds the global batch and samples/s."""
    rows = merge_over(records, "seed") if records else []
    return [_with_samples_per_s(row) for row in rows]


def _with_samples_per_s(row: Record) -> Record:
    batch, tokens = row.spec["batch"] * row.spec["ranks"], row.metrics["tokens_per_s"]
    length = row.spec["model"]["context_length"]
    figures = ("mean", "std", "median", "p10", "p90")
    each = {name: getattr(tokens, name) / length for name in figures}
    rate = Sample(unit="samples/s", n=tokens.n, **each)
    spec = {**row.spec, "global_batch": batch}
    return dataclasses.replace(row, spec=spec, metrics={**row.metrics, "samples_per_s": rate})


def answer(records: Sequence[Record]) -> str:
    """Returns the step time and peak memory of torch-fsdp relative to torch-ddp, at the largest batch."""
    kept, among, _ = undisturbed([record for record in records if record.status == "ok"])
    rows = {(row.spec["wrapper"], row.spec["global_batch"]): row for row in over_seeds(kept)}
    batches = [batch for _, batch in rows if all((name, batch) in rows for name in PAIRS[0])]
    if not batches:
        return f"torch-ddp and torch-fsdp cannot be compared: {_why_not(records)}."
    batch = max(batches)
    plain, sharded = (rows[name, batch] for name in PAIRS[0])
    time, memory = (_ratio(sharded, plain, name) for name in ("step_ms", "peak_bytes"))
    peak = f" and {memory:.2f} × its peak memory" if memory else ""
    at = f"{among}at" if among else "At"
    return (
        f"{at} a global batch of {batch}, torch-fsdp takes {time:.2f} × the step time of torch-ddp"
        f"{peak}."
    )


def _why_not(records: Sequence[Record]) -> str:
    """Returns why torch's two wrappers have no rows at the same batch."""
    measured = {record.spec["wrapper"] for record in records if record.status == "ok"}
    missing = [name for name in PAIRS[0] if name not in measured]
    if missing:
        were = "was" if len(missing) == 1 else "were"
        return f"{' and '.join(missing)} {were} not measured"
    if any(map(is_disturbed, records)):
        return "rows were disturbed"
    return "they were not measured at the same global batch"


def _ratio(above: Record, below: Record, metric: str) -> float | None:
    if metric not in above.metrics:
        return None
    return above.metrics[metric].mean / below.metrics[metric].mean


def gap_table(rows: Sequence[Record]) -> Table:
    """Returns the memory per rank that sharding saves, by part."""
    cells = []
    for plain in rows:
        sharded = next((row for row in rows if _is_sharding_partner(row, plain)), None)
        if sharded is None:
            continue
        ranks = plain.spec["ranks"]
        expected = (ranks - 1) / ranks * sum(plain.metrics[name].mean for name in KEPT)
        gaps = {
            name: plain.metrics[name].mean - sharded.metrics[name].mean
            if name in plain.metrics
            else None
            for name in ("peak_bytes", *KEPT, "rest_bytes")
        }
        sizes = {"peak": gaps.pop("peak_bytes"), "expected": expected}
        sizes |= {name.removesuffix("_bytes"): gap for name, gap in gaps.items()}
        cells.append({
            "wrappers": f"{plain.spec['wrapper']} - {sharded.spec['wrapper']}",
            "ranks": ranks,
            "global batch": plain.spec["global_batch"],
            **{f"{name} GiB": scaled(size, "bytes") for name, size in sizes.items()},
        })  # fmt: skip
    caption = (
        "Memory per rank that sharding saves: the replicating wrapper's minus the sharding wrapper's. "
        "Expected is (N−1)/N of parameters, gradients and optimizer state. The rest is activations, "
        "which both have, and buffers for communication. On a CPU, peak and rest are left out, "
        "because only the peak of whole processes is known."
    )
    return Table.from_rows(cells, caption=caption, names=1)


def _is_sharding_partner(row: Record, plain: Record) -> bool:
    wrappers = plain.spec["wrapper"], row.spec["wrapper"]
    return wrappers in PAIRS and {**row.spec, "wrapper": ""} == {**plain.spec, "wrapper": ""}


EXPERIMENT = Experiment(
    name="ddp-vs-fsdp",
    title="Replicated and sharded weights",
    question="How much memory do sharded weights save in training BERT, and how much time do they cost?",
    method=(
        "Each rank is a process. BERT trains with the masked-language-model loss on random pairs of "
        "texts, with three seeds of weights and tokens. Throughput and step time are means over the "
        "steps of each seed; memory is the peak of each rank. The difference between a replicating "
        "and a sharding wrapper is split into parameters, gradients, optimizer state and the rest."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="two processes on one CPU train a tiny BERT; BERT-base on GPUs has other figures",
)
