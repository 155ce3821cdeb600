"""E11: replicated against sharded training of BERT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.ddp_vs_fsdp import aggregated, comparison_table, gap_table
from stepgauge.report.page import Block
from stepgauge.report.table import Table
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.ddp_vs_fsdp import COMPARED, GLOBAL_BATCHES, SEEDS, GlobalBatch
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine, needs_two_gpus
from stepgauge.study.published import beside_table

MOST_RANKS = 4  # as S3
# S3, 4 GPUs: global batch -> (samples/s, peak GB), by what replicates and what shards.
_S3: dict[str, dict[int, tuple[float, float]]] = {
    "torch-ddp": {64: (111.2, 38.3), 16: (103.1, 10.9)},
    "torch-fsdp": {64: (102.9, 37.5), 16: (102.3, 10.2)},
}


def specs(machine: Machine, folder: Path) -> Sequence[DataParallelSpec]:
    ranks = min(machine.gpus, MOST_RANKS) if machine.is_gpu else 2
    batches = [batch for batch in GLOBAL_BATCHES if batch % ranks == 0] if machine.is_gpu else [4]
    return [
        _spec(machine, wrapper, ranks, batch, seed)
        for batch in batches
        for wrapper in COMPARED
        for seed in SEEDS
    ]


def _spec(machine: Machine, wrapper: str, ranks: int, batch: int, seed: int) -> DataParallelSpec:
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
        batch=GlobalBatch(global_batch=batch).of_rank(ranks),
        seed=seed,
        **counts,
    ).canonical()


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    rows = aggregated(records)
    return [comparison_table(rows), gap_table(rows), _beside(rows)]


def answer(records: Sequence[Record]) -> str:
    """Sharding's memory and time beside replication, torch's wrappers, at the largest batch."""
    rows = {(row["wrapper"], row["global_batch"]): row for row in aggregated(records)}
    batch = max((batch for _, batch in rows), default=0)
    plain, sharded = (rows.get((name, batch)) for name in ("torch-ddp", "torch-fsdp"))
    if not plain or not sharded:
        return ""
    time = sharded["step_ms"]["mean"] / plain["step_ms"]["mean"]
    peaks = [row.get("peak_bytes", {}).get("mean") for row in (plain, sharded)]
    memory = f" and {peaks[1] / peaks[0]:.2f} of its peak memory" if all(peaks) else ""
    return f"At a global batch of {batch} torch-fsdp takes {time:.2f} of torch-ddp's step{memory}."


def _beside(rows: Sequence[dict[str, Any]]) -> Table:
    """S3's figures beside those measured here of the same wrapper and global batch."""
    base = {(r["wrapper"], r["global_batch"]): r for r in rows if r["size"] == "bert-base"}
    shown = []
    for wrapper, of_batches in _S3.items():
        for batch, (rate, gigabytes) in of_batches.items():
            ours = base.get((wrapper, batch), {})
            peak = ours.get("peak_bytes", {}).get("mean")
            shown.append({
                "wrapper": wrapper, "global batch": batch, "here ranks": ours.get("ranks"),
                "here samples/s": ours.get("samples_per_s", {}).get("mean"),
                "here peak GB": peak and peak / 1e9, "published samples/s": rate,
                "published peak GB": gigabytes, "source": "S3",
            })  # fmt: skip
    note = "S3 used 4 of its GPUs; its sequence and precision are not stated"
    return beside_table(shown, note=note)


EXPERIMENT = Experiment(
    name="ddp-vs-fsdp",
    title="Replicated against sharded weights",
    question="What do sharded weights save a rank of BERT, and what do they cost?",
    method=(
        "One process a rank, BERT with the masked-language-model loss on random pairs of texts, three seeds of weights "
        "and tokens. Throughput and step time are means over each seed's steps; memory is each rank's peak. The gap "
        "between a replicating and a sharding wrapper is taken apart into parameters, gradients, optimizer state and "
        "the rest."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="two processes of one CPU train a tiny BERT: figures of neither GPUs nor BERT-base",
)
