"""Rows of layouts on the GPUs of one host, one part after another in one process, so that ranks are
started once for rows that follow one another:

    python benchmarks/layout_rows.py OUT --parts context sharded --seconds 120
    python benchmarks/layout_rows.py OUT --small        # on a CPU: that every row runs

Writes OUT/records.jsonl, each row when it is there, and prints step, throughput a GPU over that of
the part's row on one GPU, and of pipelines the step that was simulated before. No row is begun after
--seconds. All blocks are compiled and 4096 wide, weights in bf16, optimizer AdamW:

  context   one sequence of 32,768 tokens on one GPU, and cut over all
  sharded   8192 tokens a GPU, 16 blocks: ZeRO 3 beside torch's fully_shard
  pipeline  16 blocks cut by measured time, one sequence of 4096 a micro-batch, forward and
            backward: schedules beside torch's of the same name, eager and compiled, with 2 to 32
            micro-batches
  bert      BERT-base, 64 sequences of 128 in 4 and 64 micro-batches: recorded, eager, torch's; its
            stages of equal FLOPs and one that is overweight
  llama     Llama 3 of 8 B parameters under each layout that may hold it
  pairs     8192 tokens a sequence, 16 blocks: two axes at once; on four GPUs
"""

import argparse
import dataclasses
import functools
import itertools
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

PARTS = ("context", "sharded", "pipeline", "bert", "llama", "pairs")
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
        for layout in ("none", f"cp{n} ulysses zero2", f"cp{n} zero2", f"cp{n} zero1"):
            yield self.layout(model, layout, 1)
        # Without its communication this is each GPU alone at once, of which the slower one counts.
        yield self.layout(model, f"dp{n} zero2", n)

    def sharded(self) -> Iterator[Any]:
        n, model = self.gpus, self.network(16, 4096)
        yield self.layout(model, "none", 2)
        for layout in (f"dp{n} zero3", f"dp{n} torch-fsdp", f"dp{n} zero1"):
            yield self.layout(model, layout, 2 * n)

    def schedule(self, name: str, ranks: int, **changes: Any) -> PipelineSpec:
        fast = {"warmup": 1, "steps": 3, "balance": "time"}
        asked = {**self.common, "ranks": ranks, **fast, **changes}
        if self.small:
            asked |= {"cuda_graphs": False, "warmup": 1, "steps": 1}
        batch = asked.setdefault("batch", asked["micro_batches"])
        asked["micro_batches"] = min(asked["micro_batches"], batch)
        return PipelineSpec(schedule=name, **asked)

    def pipeline(self) -> Iterator[Any]:
        n = self.gpus
        model = dataclasses.replace(self.network(16, 4096), attention="sdpa", loss="cross-entropy")
        row = functools.partial(self.schedule, model=model, micro_batches=8)
        paired = ("zbv", "1f1b", "interleaved", "izb", "dualpipev", "gpipe")
        for compile in ("off", "blocks"):
            yield row("1f1b", 1, compile=compile, micro_batches=4)
            for name in paired:
                yield row(name, n, compile=compile)
                if compile == "off" or name in ("1f1b", "interleaved", "gpipe"):
                    yield row(f"torch-{name}", n, compile=compile)
            if compile == "off":
                for name in ("v-half", "v-min"):
                    yield row(name, n, compile=compile)
                for m in (2, 4):  # mostly bubble
                    yield row("1f1b", n, compile=compile, micro_batches=m)
        for name in ("zbv", "dualpipev", "interleaved"):
            yield row(name, n, balance="step")
        yield row("zbv", n, fill=True)
        yield row("zbv", n, fill=True, balance="step")
        for m, name in itertools.product((16, 32), ("zbv", "1f1b", "torch-1f1b")):
            yield row(name, n, micro_batches=m, steps=2)

    def bert(self) -> Iterator[Any]:
        size, length, batch = ("bert-tiny", 16, 8) if self.small else ("bert-base", 128, 64)
        model = BertSpec.preset(size, context_length=length)
        row = functools.partial(
            self.schedule, model=model, size=size, batch=batch, compile="off", balance="flops"
        )
        yield row("1f1b", 1, micro_batches=1, cuda_graphs=True)
        for m, n in itertools.product((4, 64), range(2, self.gpus + 1)):
            yield row("1f1b", n, micro_batches=m, cuda_graphs=True, steps=10)
            for seed in range(3 if m == 4 else 1):  # hosts are not the same from second to second
                yield row("1f1b", n, micro_batches=m, seed=seed)
                yield row("torch-1f1b", n, micro_batches=m, seed=seed)
        yield row("1f1b", self.gpus, micro_batches=16, cuda_graphs=True, overweight=3)

    def llama(self) -> Iterator[Any]:
        n, model = self.gpus, read_network(LLAMA, context_length=4096, attention="triton")
        model = dataclasses.replace(model, loss="fused", **(self._tiny() if self.small else {}))
        layouts = ["none", f"dp{n} zero2", f"tp{n} overlap", f"pp{n} zbv m{2 * n}"]
        layouts += [f"dp{n} zero3", f"cp{n} ulysses zero2", f"pp{n} 1f1b m{2 * n}", f"tp{n}"]
        if n == 4:
            layouts[2:2] = ["dp2 zero3 tp2 overlap", "dp2 zero1 pp2 zbv m4", "pp2 1f1b m8 tp2"]
        for layout in layouts:
            yield self.layout(
                model,
                layout,
                2 * n,
                checkpointing="selective",
                **({} if self.small else {"warmup": 1, "steps": 3}),
            )

    def _tiny(self) -> dict[str, Any]:
        return {**TINY, "num_kv_heads": 4, "num_layers": 4 * self.gpus, "context_length": 32}

    def pairs(self) -> Iterator[Any]:
        if self.gpus < 4:
            return
        model = self.network(16, 8192)
        yield self.layout(model, "none", 1)
        yield self.layout(model, "dp2 zero1 tp2 overlap", 2)
        yield self.layout(model, "dp2 zero3 tp2 overlap", 2)
        for layout in ("tp4 overlap", "dp2 zero1 cp2", "pp4 zbv m8", "dp2 zero1 pp2 zbv m4"):
            yield self.layout(model, layout, 8 if "pp" in layout else 2)


def is_told(job: Job) -> bool:
    """Predictions of torch's schedules are ours, and one rank has no schedule."""
    is_ours = isinstance(job.spec, PipelineSpec) and job.spec.ranks > 1 and not job.spec.is_torch
    return job.provenance == "measured" or is_ours


def name_of(spec: Any) -> str:
    named = getattr(spec, "layout", "") or f"{spec.ranks} x {spec.schedule} m{spec.micro_batches}"
    named += f", compile {spec.compile}" + ", graphs" * spec.cuda_graphs
    return named + ", filled" * getattr(spec, "fill", False)


def tell(job: Job, record: Record, before: Record | None, alone: float | None) -> float | None:
    """Prints a row, and how far the one before it was off that predicted it; gives tokens a second
    and GPU of a row on one GPU.
    """
    spec, named = job.spec, name_of(job.spec)
    if record.status != "ok":
        print(f"{record.provenance} {named}: {record.status}: {record.note[:300]}", flush=True)
        return alone
    ranks, ms = spec.ranks, record.median("step_ms")
    tokens = spec.batch * spec.model.context_length / ms / ranks
    over = f", {tokens / alone:.3f} of one GPU" if alone and ranks > 1 else ""
    if before and before.provenance == "modelled" and before.key == record.key:
        over += f", simulated {100 * (before.median('step_ms') / ms - 1):+.1f} %"
        peaks = [found.series.get("rank_peak_bytes", []) for found in (before, record)]
        for predicted, peak in zip(*peaks, strict=True):
            over += f", peak {100 * (predicted / peak - 1):+.1f} % of {peak / 2**30:.1f} GiB"
    if "without_data_ms" in record.metrics:
        over += f", without data {record.median('without_data_ms'):.2f} ms"
    over += f", MFU {record.median('mfu'):.3f}" if "mfu" in record.metrics else ""
    print(f"{record.provenance} {named}: {ms:.2f} ms{over}", flush=True)
    return tokens if ranks == 1 and record.provenance == "measured" else alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose printed names have one")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    rows = Rows(asked.gpus or (2 if asked.small else torch.cuda.device_count()), asked.small)
    for part in asked.parts:
        specs = [s for s in getattr(rows, part)() if any(text in name_of(s) for text in asked.only)]
        jobs = [job for job in checked_jobs(specs, asked.out) if is_told(job)]
        alone, before = None, None
        print(f"-- {part}, {end - time.monotonic():.0f} s left", flush=True)
        if time.monotonic() > end:
            continue
        for result in sweep(jobs, RunStore(asked.out)):
            alone = tell(result.job, result.record, before, alone)
            before = result.record
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
