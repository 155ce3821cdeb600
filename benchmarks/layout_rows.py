"""Rows of layouts on the GPUs of one host, one part after another in one process, so that ranks are
started once for rows that follow one another:

    python benchmarks/layout_rows.py OUT --parts context sharded --seconds 120
    python benchmarks/layout_rows.py OUT --small        # on a CPU: that every row runs

Writes OUT/records.jsonl, each row when it is there, and prints step, throughput a GPU over that of
the part's row on one GPU, and of pipelines the step that was simulated before. No row is begun after
--seconds. All blocks are compiled and 4096 wide, weights in bf16, optimizer AdamW:

  context   one sequence of 32,768 tokens on one GPU, and cut over all
  sharded   8192 tokens a GPU, 16 blocks: ZeRO 3 beside torch's fully_shard
  pipeline  16 blocks, one sequence of 4096 a micro-batch, forward and backward: schedules beside
            torch's of the same name, with CUDA graphs, eager; BERT-base in 64 micro-batches
  llama     Llama 3 of 8 B parameters under each layout that may hold it
  pairs     8192 tokens a sequence, 16 blocks: two axes at once; on four GPUs
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench.jobs import checked_jobs
from stepgauge.bench.sweep import Job, sweep
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.hf_config import read_network
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore

PARTS = ("context", "sharded", "pipeline", "llama", "pairs")
LLAMA = Path(__file__).with_name("llama-3-8b.json")
SHAPE = {"d_model": 4096, "d_ff": 11_008, "num_heads": 32, "vocab_size": 32_000}
TINY = {"d_model": 64, "d_ff": 96, "num_heads": 4, "vocab_size": 64}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The specs of a part, on so many devices."""

    gpus: int
    small: bool

    def network(self, blocks: int, context: int) -> ModelSpec:
        if self.small:
            blocks, context = min(blocks, 4 * self.gpus), 32
        shape = TINY if self.small else SHAPE
        return ModelSpec(
            num_layers=blocks, context_length=context, attention="triton", loss="fused", **shape
        )

    @property
    def common(self) -> dict[str, Any]:
        if self.small:
            return {"device": "cpu", "precision": "fp32", "warmup": 1, "steps": 1}
        steps = {"warmup": 2, "steps": 4}
        return {"device": "cuda", "precision": "bf16-pure", "compile": "blocks", **steps}

    def layout(self, model: ModelSpec, layout: str, batch: int, **changes: Any) -> LayoutSpec:
        asked = {**self.common, **({} if self.small else changes)}
        return LayoutSpec(model=model, layout=layout, batch=batch, **asked)

    def context(self) -> Iterator[Any]:
        n, model = self.gpus, self.network(8, 32_768)
        for layout in ("none", f"cp{n} zero1", f"cp{n}"):
            yield self.layout(model, layout, 1)

    def sharded(self) -> Iterator[Any]:
        n, model = self.gpus, self.network(16, 4096)
        yield self.layout(model, "none", 2)
        for layout in (f"dp{n} zero3", f"dp{n} torch-fsdp", f"dp{n} zero1"):
            yield self.layout(model, layout, 2 * n)

    def pipeline(self) -> Iterator[Any]:
        n, m = self.gpus, 4 * self.gpus
        model = dataclasses.replace(self.network(16, 4096), attention="sdpa", loss="cross-entropy")

        def row(schedule: str, **changes: Any) -> PipelineSpec:
            asked = {**self.common, "micro_batches": m, "batch": m, "ranks": n, **changes}
            if self.small:
                asked["cuda_graphs"] = False
            return PipelineSpec(schedule=schedule, **{"model": model, **asked})

        yield row("1f1b", ranks=1)
        for schedule in ("zbv", "1f1b", "torch-1f1b", "interleaved", "torch-interleaved", "v-half"):
            yield row(schedule)
        yield row("zbv", fill=True)
        for schedule in ("zbv", "1f1b"):
            yield row(schedule, cuda_graphs=True)
        yield row("1f1b", ranks=1, compile="off")
        for schedule in ("zbv", "torch-zbv", "1f1b", "v-min"):
            yield row(schedule, compile="off")
        bert = {"model": self._bert(), "batch": 64}
        yield row("1f1b", compile="off", micro_batches=64, **bert)

    def _bert(self) -> BertSpec:
        size, length = ("bert-tiny", 16) if self.small else ("bert-base", 128)
        return BertSpec.preset(size, context_length=length)

    def llama(self) -> Iterator[Any]:
        n, model = self.gpus, read_network(LLAMA, context_length=4096, attention="triton")
        model = dataclasses.replace(model, loss="fused", **(self._tiny() if self.small else {}))
        layouts = [f"dp{n} zero3", f"tp{n} overlap", f"pp{n} zbv m{2 * n}", f"tp{n}"]
        layouts += ["none", f"dp{n} zero1", f"pp{n} 1f1b m{2 * n}", f"cp{n} zero1"]
        if n == 4:
            layouts[2:2] = ["dp2 zero3 tp2 overlap", "dp2 zero1 pp2 zbv m4", "pp2 1f1b m8 tp2"]
        for layout in layouts:
            eager = "zero3" in layout and "tp" in layout
            yield self.layout(
                model,
                layout,
                2 * n,
                checkpointing="selective",
                compile="off" if eager else "blocks",
            )

    def _tiny(self) -> dict[str, Any]:
        return {**TINY, "num_kv_heads": 4, "num_layers": 4 * self.gpus, "context_length": 32}

    def pairs(self) -> Iterator[Any]:
        if self.gpus < 4:
            return
        model = self.network(16, 8192)
        yield self.layout(model, "none", 1)
        yield self.layout(model, "dp2 zero1 tp2 overlap", 2)
        yield self.layout(model, "dp2 zero3 tp2 overlap", 2, compile="off")
        for layout in ("tp4 overlap", "dp2 zero1 cp2", "pp4 zbv m8", "dp2 zero1 pp2 zbv m4"):
            yield self.layout(model, layout, 8 if "pp" in layout else 2)


def is_torchs(spec: Any) -> bool:
    return isinstance(spec, PipelineSpec) and spec.is_torchs


def tell(job: Job, record: Record, alone: float | None) -> float | None:
    """Prints a row; gives tokens a second and GPU of a row on one GPU."""
    spec = job.spec
    named = getattr(spec, "layout", "") or f"{spec.ranks} x {spec.schedule}"
    named += f", compile {spec.compile}" + ", graphs" * spec.cuda_graphs
    named += ", filled" * getattr(spec, "fill", False)
    if record.status != "ok":
        print(f"{record.provenance} {named}: {record.status}: {record.note[:300]}", flush=True)
        return alone
    ranks, ms = spec.ranks, record.median("step_ms")
    tokens = spec.batch * spec.model.context_length / ms / ranks
    over = f", {tokens / alone:.3f} of one GPU" if alone and ranks > 1 else ""
    print(f"{record.provenance} {named}: {ms:.2f} ms{over}", flush=True)
    return tokens if ranks == 1 and record.provenance == "measured" else alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    rows = Rows(asked.gpus or (2 if asked.small else torch.cuda.device_count()), asked.small)
    for part in asked.parts:
        jobs = checked_jobs(getattr(rows, part)(), asked.out)
        jobs = [job for job in jobs if not (is_torchs(job.spec) and job.provenance == "modelled")]
        alone = None
        print(f"-- {part}, {end - time.monotonic():.0f} s left", flush=True)
        if time.monotonic() > end:
            continue
        for result in sweep(jobs, RunStore(asked.out)):
            alone = tell(result.job, result.record, alone)
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
