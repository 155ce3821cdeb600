"""E11: replicated against sharded training of BERT."""

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
from stepgauge.spec.record import Record, Sample
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import beside

MOST_RANKS = 4  # as S3
SEEDS = (1, 2, 3)
GLOBAL_BATCHES = (64, 16)
# Each replicating wrapper beside the sharding one of the same make.
PAIRS = (("torch-ddp", "torch-fsdp"), ("bucketed", "zero3"))
SHOWN = ("samples_per_s", "step_ms", "peak_bytes")
KEPT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
PUBLISHED_AT = (
    "S3 used 4 of its GPUs; its sequence and precision are not stated, its GB are 10⁹ bytes"
)


def specs(machine: StudyMachine, folder: Path) -> Sequence[DataParallelSpec]:
    ranks = min(machine.gpus, MOST_RANKS) if machine.is_gpu else 2
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
    without = [record for record in records if record.status != "ok"]
    failed = [
        Text(f"{name}: {remark(r)}.") for name, r in zip(labels(without), without, strict=True)
    ]
    if not rows:
        return failed
    figures = [
        dataclasses.replace(row, metrics={n: row.metrics[n] for n in SHOWN if n in row.metrics})
        for row in rows
    ]
    table = record_table(figures, statistics=("mean", "std"), first=("wrapper", "global_batch"))
    caption = (
        "Throughput and step over seeds, peak memory over ranks and seeds; std is that of a sample."
    )
    table = dataclasses.replace(table, caption=f"{caption} {table.caption}")
    return [*failed, table, gap_table(rows), beside("ddp-vs-fsdp", rows, PUBLISHED_AT)]


def over_seeds(records: Sequence[Record]) -> list[Record]:
    """A record for the seeds of a configuration, with its global batch and samples/s."""
    rows = merge_over(records, "seed") if records else []
    return [_of_all_ranks(row) for row in rows]


def _of_all_ranks(row: Record) -> Record:
    batch, tokens = row.spec["batch"] * row.spec["ranks"], row.metrics["tokens_per_s"]
    length = row.spec["model"]["context_length"]
    figures = ("mean", "std", "median", "p10", "p90")
    each = {name: getattr(tokens, name) / length for name in figures}
    rate = Sample(unit="samples/s", n=tokens.n, **each)
    spec = {**row.spec, "global_batch": batch}
    return dataclasses.replace(row, spec=spec, metrics={**row.metrics, "samples_per_s": rate})


def answer(records: Sequence[Record]) -> str:
    """Sharding's memory and time beside replication, torch's wrappers, at the largest batch."""
    held, among = undisturbed([record for record in records if record.status == "ok"])
    rows = {(row.spec["wrapper"], row.spec["global_batch"]): row for row in over_seeds(held)}
    batches = [batch for _, batch in rows if all((name, batch) in rows for name in PAIRS[0])]
    if not batches:
        return f"{_why_not(records)}: torch-ddp and torch-fsdp cannot be compared here."
    batch = max(batches)
    plain, sharded = (rows[name, batch] for name in PAIRS[0])
    time, memory = (_ratio(sharded, plain, name) for name in ("step_ms", "peak_bytes"))
    of_peak = f" and {memory:.2f} of its peak memory" if memory else ""
    at = f"{among}at" if among else "At"
    return (
        f"{at} a global batch of {batch} torch-fsdp takes {time:.2f} of torch-ddp's step{of_peak}."
    )


def _why_not(records: Sequence[Record]) -> str:
    """What kept both of torch's wrappers from having a row at one batch."""
    figures = {record.spec["wrapper"] for record in records if record.status == "ok"}
    missing = [name for name in PAIRS[0] if name not in figures]
    return f"No row of {' and '.join(missing)} has figures" if missing else "Rows were disturbed"


def _ratio(above: Record, below: Record, metric: str) -> float | None:
    if metric not in above.metrics:
        return None
    return above.metrics[metric].mean / below.metrics[metric].mean


def gap_table(rows: Sequence[Record]) -> Table:
    """What sharding frees a rank of, by part: the replicating wrapper's bytes less its own."""
    cells = []
    for plain in rows:
        sharded = next((row for row in rows if _shards(row, plain)), None)
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
            "wrappers": f"{plain.spec['wrapper']} less {sharded.spec['wrapper']}",
            "ranks": ranks,
            "global batch": plain.spec["global_batch"],
            **{f"{name} GiB": scaled(size, "bytes") for name, size in sizes.items()},
        })  # fmt: skip
    caption = (
        "Memory that sharding saves on a rank. Expected: (N−1)/N of parameters, gradients and "
        "optimizer state; the rest is activations, which both have, and what a wrapper keeps for "
        "communication. On a CPU peaks are those of processes and not of tensors: they and the "
        "rest are left out."
    )
    return Table.from_rows(cells, caption=caption, names=1)


def _shards(row: Record, plain: Record) -> bool:
    """Whether the row is the sharding partner of the plain one."""
    wrappers = plain.spec["wrapper"], row.spec["wrapper"]
    return wrappers in PAIRS and {**row.spec, "wrapper": ""} == {**plain.spec, "wrapper": ""}


EXPERIMENT = Experiment(
    name="ddp-vs-fsdp",
    title="Replicated against sharded weights",
    question="What do sharded weights save a rank of BERT, and what do they cost?",
    method=(
        "One process a rank, BERT with the masked-language-model loss on random pairs of texts, "
        "three seeds of weights and tokens. Throughput and step time are means over each seed's "
        "steps; memory is each rank's peak. The gap between a replicating and a sharding wrapper "
        "is taken apart into parameters, gradients, optimizer state and the rest."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="two processes of one CPU train a tiny BERT: figures of neither GPUs nor BERT-base",
)
