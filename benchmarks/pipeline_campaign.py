"""Pipelines on GPUs of one host: parity first, then our schedules beside torch's, then BERT-base.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python benchmarks/pipeline_campaign.py \
        --ranks 4 --device cuda --out $OUT/pipeline.jsonl --seconds 440

Every line is a JSON object; `part` says which: "parity" (a schedule against one process), "ideal"
(one GPU's time over the number of ranks), and records of stepgauge, modelled before measured. What
does not fit into --seconds any more is left out, with a line that says so. `--small` is for a CPU.

What it decides: which schedules keep up with torch's of the same name, how far each is from the
ideal, how well the simulator does, and how many computations ahead receives are best posted.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.bench.pipeline import PipelineBench, durations, measured, modelled
from stepgauge.bench.pipeline_parts import build_stage, mean_loss
from stepgauge.cost.fill import fill_bubbles
from stepgauge.cost.timeline import simulate
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.runtime.launch import launch
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.pipeline_cut import cut
from stepgauge.spec.plan.pipeline import SCHEDULES, lower, to_text
from stepgauge.train.build import batch_for

TOLERANCE = 2e-3  # of the largest gradient, in fp32 with other orders of summation


class Campaign:
    """What one rank does; rank 0 writes."""

    def __init__(self, path: str, device: str, seconds: float):
        self.path, self.kind, self.end = Path(path), device, time.monotonic() + seconds
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        on_gpu = device == "cuda"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )

    def write(self, **line: object) -> None:
        if self.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps({k: v for k, v in line.items() if k != "record"})[:300], flush=True)

    def out_of_time(self) -> bool:
        """The same answer on all ranks."""
        left = torch.tensor([self.end - time.monotonic()], device=self.device)
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        return left.item() < 0

    # -- parity ----------------------------------------------------------------------------------

    def parity(self, spec: PipelineSpec) -> None:
        """Loss and every gradient of this rank's stages against the whole network here."""
        tokens, targets, *_ = batch_for(spec.model, spec.batch, 1)
        tokens, targets = tokens.to(self.device), targets.to(self.device)

        def build(stage: int) -> torch.nn.Module:
            return build_stage(spec, cut(spec)[stage], self.device, torch.float32)

        pipeline = Pipeline(
            build, spec.plan(), loss=mean_loss, device=self.device, ahead=spec.ahead
        )
        loss = pipeline.step((tokens,), (targets,))
        plain = dataclasses.replace(spec, compile="off")
        alone = [build_stage(plain, parts, self.device, torch.float32) for parts in cut(plain)]
        x: Tensor = tokens
        for module in alone:
            x = module(x)
        expected = mean_loss(x, targets)
        expected.backward()
        off = 0.0
        for stage, module in pipeline.modules.items():
            for own, other in zip(module.parameters(), alone[stage].parameters(), strict=True):
                scale = other.grad.abs().max()
                off = max(off, ((own.grad - other.grad).abs().max() / scale).item())
        if loss is not None:
            off = max(off, (loss - expected).abs().item())
        told: list[object] = [None] * self.size
        dist.all_gather_object(told, off)
        worst = max(map(float, told))  # type: ignore[arg-type]
        self.write(part="parity", schedule=spec.schedule, compile=spec.compile, worst=worst)
        pipeline.close()
        if worst > TOLERANCE:
            raise RuntimeError(f"{spec.schedule} is off by {worst:.2g} of the largest gradient")

    # -- figures ---------------------------------------------------------------------------------

    def ideal(self, spec: PipelineSpec) -> None:
        """One device's time for the same micro-batches, over the number of ranks. All ranks do it
        at once, each alone; the median rank counts.
        """
        if self.out_of_time():
            self.write(part="left out", what="ideal", compile=spec.compile)
            return
        one = dataclasses.replace(spec, schedule="1f1b", ranks=1)
        dtype = torch.bfloat16 if spec.precision == "bf16-pure" else torch.float32
        module = build_stage(one, cut(one)[0], self.device, dtype)
        tokens, targets, *_ = batch_for(spec.model, spec.batch, 1)
        parts = [
            [part.to(self.device) for part in tensor.chunk(spec.micro_batches)]
            for tensor in (tokens, targets)
        ]
        times = []
        for _ in range(4):
            self.wait()
            start = time.perf_counter()
            for some, answers in zip(*parts, strict=True):
                (mean_loss(module(some), answers) / spec.micro_batches).backward()
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
        told: list[float] = [0.0] * self.size
        dist.all_gather_object(told, statistics.median(times[1:]))
        ms = statistics.median(told) / self.size
        self.write(
            part="ideal", ms=ms, micro_batches=spec.micro_batches, compile=spec.compile,
            size=spec.size,
        )  # fmt: skip

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(self, spec: PipelineSpec, *, predicts: bool = True) -> None:
        """The modelled record, then the measured one. Torch's pipelines are not simulated again."""
        if self.out_of_time():
            self.write(part="left out", schedule=spec.schedule, micro_batches=spec.micro_batches)
            return
        try:
            with PipelineBench(spec) as bench:
                bench.warm_up()
                told: list[object] = [None] * self.size
                if not spec.is_torchs and predicts:
                    dist.all_gather_object(told, bench.probe())
                    if self.rank == 0:
                        self.report("modelled", spec, modelled(spec, told))  # type: ignore[arg-type]
                dist.all_gather_object(told, bench.figures())
                if self.rank == 0:
                    self.report("measured", spec, measured(spec, told))  # type: ignore[arg-type]
        except (torch.OutOfMemoryError, ValueError, NotImplementedError) as error:
            # On all ranks alike, or the next row hangs and the launcher ends it.
            self.write(part="failed", schedule=spec.schedule, why=str(error)[:200])

    def filled(self, spec: PipelineSpec) -> None:
        """The schedule with each W where its rank would wait, by what the stages take alone."""
        if self.out_of_time():
            self.write(part="left out", schedule=f"{spec.schedule} filled")
            return
        probes: list[object] = [None] * self.size
        with PipelineBench(spec) as bench:
            bench.warm_up(1)
            dist.all_gather_object(probes, bench.probe())
        took = durations(probes, spec.num_stages)  # type: ignore[arg-type]
        schedule = fill_bubbles(spec.plan(), took)
        with PipelineBench(spec, schedule) as bench:
            bench.warm_up()
            told: list[object] = [None] * self.size
            dist.all_gather_object(told, bench.figures())
        if self.rank == 0:
            self.write(
                part="filled", schedule=spec.schedule, micro_batches=spec.micro_batches,
                compile=spec.compile, changed=schedule != spec.plan(),
                predicted_ms=simulate(lower(schedule, ahead=spec.ahead), took).step_ms,
                step_ms=measured(spec, told).median("step_ms"),  # type: ignore[arg-type]
                text=to_text(schedule),
            )  # fmt: skip

    def report(self, part: str, spec: PipelineSpec, record: object) -> None:
        step = record.median("step_ms")  # type: ignore[attr-defined]
        self.write(
            part=part, schedule=spec.schedule, micro_batches=spec.micro_batches,
            compile=spec.compile, ahead=spec.ahead, step_ms=step,
            record=json.loads(record.to_json()),  # type: ignore[attr-defined]
        )  # fmt: skip


def run(path: str, device: str, seconds: float, small: bool) -> None:
    """Runs on every rank."""
    torch._dynamo.config.recompile_limit = 64  # two kinds of block, split and not, in many stages
    campaign = Campaign(path, device, seconds)
    ranks = campaign.size
    tiny = ModelSpec.preset(
        "nano", d_model=64, d_ff=128, num_layers=2 * ranks, num_heads=2, vocab_size=64,
        context_length=32,
    )  # fmt: skip
    common = {"ranks": ranks, "device": device}
    for schedule in SCHEDULES:
        campaign.parity(PipelineSpec(
            model=tiny, schedule=schedule, micro_batches=2 * ranks, batch=2 * ranks, **common
        ))  # fmt: skip
    if device == "cuda":
        campaign.parity(PipelineSpec(
            model=tiny, schedule="zbv", micro_batches=2 * ranks, batch=2 * ranks,
            compile="blocks", **common,
        ))  # fmt: skip
    wide = tiny if small else ModelSpec.preset(
        "2.7b", d_model=4096, d_ff=11_008, num_layers=16, num_heads=32, vocab_size=32_000,
        context_length=4096,
    )  # fmt: skip
    table(campaign, wide, small, common)
    encoder(campaign, small, common)


def table(campaign: Campaign, model: ModelSpec, small: bool, common: dict[str, object]) -> None:
    """The table of 16 blocks 4096 wide, one sequence a micro-batch."""
    precision = "fp32" if small else "bf16-pure"
    steps = {"warmup": 1, "steps": 2} if small else {"warmup": 2, "steps": 5}

    def spec(schedule: str, m: int, **changes: object) -> PipelineSpec:
        return PipelineSpec(
            model=model, size="custom", schedule=schedule, micro_batches=m, batch=m,
            precision=precision, **{**common, **steps, **changes},
        )  # fmt: skip

    m = 2 * campaign.size
    campaign.ideal(spec("1f1b", m))
    for schedule in ("1f1b", "zbv", "izb", "interleaved", "gpipe", "dualpipev"):
        campaign.row(spec(schedule, m))
        campaign.row(spec(f"torch-{schedule}", m))
    for schedule in ("zb-h1", "v-half", "v-min"):
        campaign.row(spec(schedule, m))
    campaign.row(spec("zbv", m, ahead=0), predicts=False)
    campaign.row(spec("zbv", m, transport="messages"), predicts=False)
    campaign.filled(spec("zbv", m))
    for schedule in ("zbv", "1f1b", "torch-1f1b"):
        campaign.row(spec(schedule, 2 * m))
    if not small:
        compiled = {"compile": "blocks"}
        campaign.ideal(spec("1f1b", m, **compiled))
        for schedule in ("1f1b", "torch-1f1b", "zbv", "interleaved", "torch-interleaved", "izb"):
            campaign.row(spec(schedule, m, **compiled))
        campaign.filled(spec("zbv", m, **compiled))
        campaign.row(spec("zbv", 4 * m, **compiled))


def encoder(campaign: Campaign, small: bool, common: dict[str, object]) -> None:
    """E12: BERT-base, batch 64 of 128 tokens, by chunks."""
    size, length = ("bert-mini", 16) if small else ("bert-base", 128)
    model = BertSpec.preset(size, context_length=length)
    batch = 8 if small else 64
    chunks = (4, 8) if small else (4, 16, 64)
    for compile in ("off",) if small else ("off", "blocks"):
        for m in chunks:
            for schedule in ("1f1b", "torch-1f1b"):
                campaign.row(PipelineSpec(
                    model=model, size=size, schedule=schedule, micro_batches=m, batch=batch,
                    precision="fp32" if small else "bf16-pure", compile=compile, warmup=1 if small else 2,
                    steps=2 if small else 3, **common,
                ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    launch(
        run, options.out, options.device, options.seconds, options.small,
        ranks=options.ranks, device=options.device,
    )  # fmt: skip


if __name__ == "__main__":
    main()
