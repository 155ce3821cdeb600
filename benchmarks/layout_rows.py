"""Measures training steps under layouts on the GPUs of one host. All rows of a part run in one
process, so that ranks start once for consecutive rows.

    python benchmarks/layout_rows.py OUT --parts context sharded --seconds 120
    python benchmarks/layout_rows.py OUT --small        # on a CPU, to check that every row runs

  context   one sequence of 32,768 tokens: on one GPU, and split over all GPUs
  sharded   8192 tokens per GPU, 16 blocks: ZeRO 3 next to torch's fully_shard
  pipeline  16 blocks, one sequence of 4096 tokens per micro-batch, stages balanced by measured time,
            forward and backward: our schedules next to torch's of the same name, eager and compiled,
            with 2 to 32 micro-batches
  bert      BERT-base, 64 sequences of 128 tokens in 4 and 64 micro-batches: CUDA graphs, eager, and
            torch's schedule; stages of equal FLOPs, and stages of which one has too much work
  llama     Llama 3 8B under each layout that may fit
  pairs     8192 tokens per sequence, 16 blocks: two axes at once; needs four GPUs
  sequences 8192 tokens per tensor group in 1 to 4 sequences, 8 blocks: tensor parallel, alone and with ZeRO

Unless a part says otherwise, blocks are compiled and 4096 wide, weights are bf16, and the optimizer
is AdamW. Appends each row to OUT/records.jsonl as soon as it is measured. Prints the step time, the
throughput per GPU relative to the part's row on one GPU, and for pipelines the error of the
simulated step. No row starts after --seconds.
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

PARTS = ("context", "sharded", "pipeline", "bert", "llama", "pairs", "sequences")
LLAMA = Path(__file__).with_name("llama-3-8b.json")
SHAPE = {"d_model": 4096, "d_ff": 11_008, "num_heads": 32, "vocab_size": 32_000}
CONTEXT_LAYOUTS = ("ulysses zero2", "ulysses zero3", "zero2", "zero1")
TINY = {"d_model": 64, "d_ff": 96, "num_heads": 4, "vocab_size": 64}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The specs of each part for a number of devices. Each part is a method of the same name."""

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
        fields = {**self.common, **({} if self.small else changes)}
        return LayoutSpec(model=model, layout=layout, batch=batch, **fields)

    def context(self) -> Iterator[Any]:
        n, model = self.gpus, self.network(8, 32_768)
        for layout in ("none", *(f"cp{n} {rest}" for rest in CONTEXT_LAYOUTS)):
            yield self.layout(model, layout, 1)
        # Without communication each GPU runs alone, all at the same time. The slowest one counts.
        yield self.layout(model, f"dp{n} zero2", n)

    def sharded(self) -> Iterator[Any]:
        n, model = self.gpus, self.network(16, 4096)
        yield self.layout(model, "none", 2)
        for layout in (f"dp{n} zero3", f"dp{n} torch-fsdp", f"dp{n} zero1"):
            yield self.layout(model, layout, 2 * n)

    def schedule(self, name: str, ranks: int, **changes: Any) -> PipelineSpec:
        defaults = {"warmup": 1, "steps": 3, "balance": "time"}
        fields = {**self.common, "ranks": ranks, **defaults, **changes}
        if self.small:
            fields |= {"cuda_graphs": False, "warmup": 1, "steps": 1}
        batch = fields.setdefault("batch", fields["micro_batches"])
        fields["micro_batches"] = min(fields["micro_batches"], batch)
        return PipelineSpec(schedule=name, **fields)

    def pipeline(self) -> Iterator[Any]:
        n = self.gpus
        model = dataclasses.replace(self.network(16, 4096), attention="sdpa", loss="cross-entropy")
        row = functools.partial(self.schedule, model=model, micro_batches=8)
        names = ("zbv", "1f1b", "interleaved", "izb", "dualpipev", "gpipe")
        for compile in ("off", "blocks"):
            yield row("1f1b", 1, compile=compile, micro_batches=4)
            for name in names:
                yield row(name, n, compile=compile)
                if compile == "off" or name in ("1f1b", "interleaved", "gpipe"):
                    yield row(f"torch-{name}", n, compile=compile)
            if compile == "off":
                for name in ("v-half", "v-min"):
                    yield row(name, n, compile=compile)
                for m in (2, 4):  # most of the time is bubble
                    yield row("1f1b", n, compile=compile, micro_batches=m)
        for name in ("zbv", "dualpipev", "interleaved"):
            yield row(name, n, balance="step")
            yield row(name, n, balance="step", compile="off")
        yield row("zbv", n, fill=True)
        yield row("zbv", n, fill=True, balance="step")
        for m, name in itertools.product((16, 32), ("zbv", "1f1b", "torch-1f1b")):
            yield row(name, n, micro_batches=m, steps=2)

    def bert(self) -> Iterator[Any]:
        size, length, batch = ("bert-tiny", 16, 8) if self.small else ("bert-base", 128, 64)
        model = BertSpec.preset(size, context_length=length)
        if self.small:
            model = dataclasses.replace(model, num_layers=self.gpus)
        row = functools.partial(
            self.schedule, model=model, size=size, batch=batch, compile="off", balance="flops"
        )
        yield row("1f1b", 1, micro_batches=1, cuda_graphs=True)
        for m, n in itertools.product((4, 64), range(2, self.gpus + 1)):
            yield row("1f1b", n, micro_batches=m, cuda_graphs=True, steps=10)
            for seed in range(3 if m == 4 else 1):  # the host's speed varies from second to second
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
        settings = {"checkpointing": "selective", "warmup": 1, "steps": 3}
        for layout in layouts:  # two sequences per GPU
            yield self.layout(model, layout, 2 if layout == "none" else 2 * n, **settings)
            if layout == f"tp{n} overlap":
                yield self.layout(model, layout, 2 * n, cuda_graphs=True, **settings)

    def _tiny(self) -> dict[str, Any]:
        return {**TINY, "num_kv_heads": 4, "num_layers": 4 * self.gpus, "context_length": 32}

    def pairs(self) -> Iterator[Any]:
        if self.gpus < 4:
            return
        model = self.network(16, 8192)
        yield self.layout(model, "none", 1)
        yield self.layout(model, "dp2 zero1 tp2 overlap", 2)
        yield self.layout(model, "dp2 zero3 tp2 overlap", 2)
        for layout in ("tp4 overlap", "dp2 zero1 tp2 overlap"):
            yield self.layout(model, layout, 2, cuda_graphs=True)
        for layout in ("tp4 overlap", "dp2 zero1 cp2", "pp4 zbv m8", "dp2 zero1 pp2 zbv m4"):
            yield self.layout(model, layout, 8 if "pp" in layout else 2)

    def sequences(self) -> Iterator[Any]:
        n = self.gpus
        layouts = [f"tp{n}", f"tp{n} overlap"] + ["dp2 zero3 tp2 overlap"] * (n == 4)
        yield self.layout(self.network(8, 8192), "none", 1)
        for layout in layouts:
            for sequences in (1, 4):
                batch = sequences * (2 if layout.startswith("dp2") else 1)
                yield self.layout(self.network(8, 8192 // sequences), layout, batch)


def is_wanted(job: Job) -> bool:
    """Returns whether to run a job. Predictions run only for our pipeline schedules: the prediction
    of torch's schedule is the same as ours, and one rank has no schedule.
    """
    has_prediction = (
        isinstance(job.spec, PipelineSpec) and job.spec.ranks > 1 and not job.spec.is_torch
    )
    return job.provenance == "measured" or has_prediction


def name_of(spec: Any) -> str:
    """Returns the name of a row, as it is printed."""
    name = getattr(spec, "layout", "") or f"{spec.ranks} x {spec.schedule} m{spec.micro_batches}"
    name += (
        f", {spec.batch} x {spec.model.context_length}, compile {spec.compile}"
        + ", graphs" * spec.cuda_graphs
    )
    return name + ", filled" * getattr(spec, "fill", False)


def print_row(
    job: Job, record: Record, previous: Record | None, one_gpu: float | None
) -> float | None:
    """Prints a row. If the previous row predicted it, also prints the prediction's error.

    one_gpu  tokens per ms of the row on one GPU, if there was one. Returns the new value.
    """
    spec, name = job.spec, name_of(job.spec)
    if record.status != "ok":
        print(f"{record.provenance} {name}: {record.status}: {record.note[:300]}", flush=True)
        return one_gpu
    ranks, ms = spec.ranks, record.median("step_ms")
    tokens = spec.batch * spec.model.context_length / ms / ranks
    details = f", {tokens / one_gpu:.3f} of one GPU" if one_gpu and ranks > 1 else ""
    if previous and previous.provenance == "modelled" and previous.key == record.key:
        details += f", simulated {100 * (previous.median('step_ms') / ms - 1):+.1f} %"
        peaks = [each.series.get("rank_peak_bytes", []) for each in (previous, record)]
        for predicted, peak in zip(*peaks, strict=True):
            details += f", peak {100 * (predicted / peak - 1):+.1f} % of {peak / 2**30:.1f} GiB"
    if "without_data_ms" in record.metrics:
        details += (
            f", without data parallel communication {record.median('without_data_ms'):.2f} ms"
        )
    details += f", MFU {record.median('mfu'):.3f}" if "mfu" in record.metrics else ""
    print(f"{record.provenance} {name}: {ms:.2f} ms{details}", flush=True)
    return tokens if ranks == 1 and record.provenance == "measured" else one_gpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540.0, help="start no row after this time")
    parser.add_argument("--gpus", type=int, default=0, help="all by default")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose printed name has this text"
    )
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    rows = Rows(
        arguments.gpus or (2 if arguments.small else torch.cuda.device_count()), arguments.small
    )
    for part in arguments.parts:
        specs = [
            s for s in getattr(rows, part)() if any(text in name_of(s) for text in arguments.only)
        ]
        jobs = [job for job in checked_jobs(specs, arguments.out) if is_wanted(job)]
        one_gpu, previous = None, None
        print(f"-- {part}, {end - time.monotonic():.0f} s left", flush=True)
        if time.monotonic() > end:
            continue
        for result in sweep(jobs, RunStore(arguments.out)):
            one_gpu = print_row(result.job, result.record, previous, one_gpu)
            previous = result.record
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
