"""Times our tensor parallel next to torch's on 2 and 4 GPUs, and checks that it is correct.

    python benchmarks/tensor_parallel_campaign.py           # about 140 s on 2 GPUs
    python benchmarks/tensor_parallel_campaign.py --only "one GPU" overlapped --lengths 4096 2048 --traces
    python benchmarks/tensor_parallel_campaign.py --small   # on a CPU, to check that it runs

Measures forward and backward of 8 blocks 4096 wide (feed-forward 11,008, 32 heads) with bf16
weights, on one sequence of 8192 tokens, in these ways:

  one GPU      each GPU runs the whole network alone
  plain        ours, with collectives before and after the products
  overlapped   ours, with collectives during the products
  by piece     the same with a product for each piece, even of few rows
  plain graph, overlapped graph, by piece graph
               the step captured in one CUDA graph
  torch        torch's tensor parallel
  torch async  torch's asynchronous tensor parallel

Before a way is timed, its output and gradients are compared with one process in float32: a small
network in float32, then wide blocks in bf16.

--lengths also measures plain and overlapped blocks on shorter sequences, to find where overlap
starts to pay off. --attention triton uses the fastest attention library for the shape in all ways,
instead of torch's choice. --traces writes a trace of some steps for each rank, but not of torch's ways.

Appends a JSON line per row to $OUT/tensor_parallel.jsonl (the current folder if OUT is not set) as
soon as it is measured: ms of the slowest rank, and the mean clock and power of the GPU with the
lowest clock. Prints throughput relative to one GPU. Traces go to
$OUT/tensor_parallel_trace_WAY_RANK.json.gz. A way that hangs is ended after 40 s and reported; the
others continue.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepgauge.calibrate.timing import clock_and_power
from stepgauge.kernels.part_sum import part_sum
from stepgauge.kernels.rotary import rotate
from stepgauge.measure.timing import time_phases
from stepgauge.models.parts import ATTENTIONS
from stepgauge.models.rotary import rotary_tables
from stepgauge.models.transformer import TransformerLM, compiled
from stepgauge.parallel.tensor_parallel import TensorParallel, parallelize_tensor
from stepgauge.parallel.tensor_parallel.exchange import captured_turns
from stepgauge.runtime.launch import RankError, launch
from stepgauge.runtime.recording import on_capture_stream, record
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan import tensor as plan
from stepgauge.spec.plan.stages import parts_of
from stepgauge.spec.plan.tensor_tables import table_of

HANG_S = 40
STEPS = 25
STEPS_PER_WAIT = 5  # the host launches several steps before it waits, as in training
# Relative to one process in float32, by the dtype of the blocks. bf16 rounds to 2^-9.
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SEED = 0
# "by piece" overlaps with a product per piece, even where a piece has few rows.
OVERLAPPED = ("overlapped", "by piece", "overlapped graph", "by piece graph")
GRAPHS = ("plain graph", "overlapped graph", "by piece graph")
WAYS = ("one GPU", "plain", "plain graph", *OVERLAPPED, "torch", "torch async")


def spec_of(width: int, d_ff: int, heads: int, length: int, blocks: int) -> ModelSpec:
    # One additional block at each end, so that the others are a stage without embedding and head.
    return ModelSpec(
        vocab_size=128,
        context_length=length,
        d_model=width,
        d_ff=d_ff,
        num_heads=heads,
        num_layers=blocks + 2,
    )


SMALL = spec_of(64, 96, 4, 32, 2)
WIDE = spec_of(4096, 11008, 32, 2048, 2)
LENGTH = 8192
LEAST_ROWS = plan.LEAST_ROWS


def full_size(length: int) -> ModelSpec:
    return spec_of(4096, 11008, 32, length, 8 if length == LENGTH else 4)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a measurement."""

    length: int
    small: bool
    traces: bool
    attention: str

    def attending(self, spec: ModelSpec) -> ModelSpec:
        return dataclasses.replace(spec, attention=self.attention)


def blocks_of(spec: ModelSpec) -> range:
    """Returns the numbers of the measured blocks: all but the first and the last."""
    return range(1, spec.num_layers - 1)


class Norm(nn.Module):
    """RMSNorm written as a formula. DTensor of torch 2.11 compiles it, but fails with nn.RMSNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class TorchBlock(nn.Module):
    """A block for torch's tensor parallel: each projection is a layer of its own."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        d = spec.d_model
        self.attention_norm, self.ffn_norm = Norm(d), Norm(d)
        self.attention, self.ffn = TorchAttention(spec), TorchFeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class TorchAttention(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        d, self.head_width = spec.d_model, spec.head_width
        self.attend = ATTENTIONS[spec.attention]
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = self.attend(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class TorchFeedForward(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        d, f = spec.d_model, spec.d_ff
        self.w1, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TorchStack(nn.Module):
    """The blocks of TorchBlock with the weights of our network."""

    def __init__(self, spec: ModelSpec, like: TransformerLM):
        super().__init__()
        device, dtype = next(like.parameters()).device, next(like.parameters()).dtype
        with device:
            self.blocks = nn.ModuleList(TorchBlock(spec) for _ in blocks_of(spec)).to(dtype)
        for block, source in zip(self.blocks, like.blocks, strict=True):
            q, k, v = source.attention.input.weight.detach().chunk(3)
            gate, up = source.feed_forward.gate_up.weight.detach().chunk(2)
            pairs = {block.attention.wq: q, block.attention.wk: k, block.attention.wv: v}
            pairs |= {block.attention.wo: source.attention.output.weight.detach()}
            pairs |= {block.ffn.w1: gate, block.ffn.w3: up}
            pairs |= {block.ffn.w2: source.feed_forward.down.weight.detach()}
            for layer, weight in pairs.items():
                layer.weight.data.copy_(weight)
            block.attention_norm.weight.data.copy_(source.attention_norm.weight.detach())
            block.ffn_norm.weight.data.copy_(source.feed_forward_norm.weight.detach())
        cos, sin = rotary_tables(spec, device)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def torch_plan() -> dict[str, object]:
    """Returns the plan of torch's parallelize_module for a block with sequence parallel norms."""
    gather = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    norms = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    columns = ("attention.wq", "attention.wk", "attention.wv", "ffn.w1", "ffn.w3")
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "ffn.w2")}
    return {**gather, **norms, **{name: ColwiseParallel() for name in columns}, **rows}


@dataclasses.dataclass(frozen=True)
class Network:
    """The blocks under one of WAYS. Input and output are this rank's part of the sequence, or the
    whole sequence on one GPU.
    """

    way: str
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    module: nn.Module
    cut: TensorParallel | None

    @classmethod
    def of(cls, way: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "Network":
        module, cut = whole_blocks(spec, device, dtype), None
        if way.startswith("torch"):
            module = TorchStack(spec, module)
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for block in module.blocks:
                parallelize_module(block, mesh, torch_plan())
        elif way != "one GPU":
            table = table_of(spec, blocks_of(spec))
            cut = parallelize_tensor(module, table, overlap=way in OVERLAPPED, part_sum=part_sum)
        return cls(way, spec, device, dtype, module, cut)

    def part(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the tokens. torch's tensor parallel cuts each sequence."""
        if self.way == "one GPU":
            return x
        if self.cut:
            return self.cut.stream.split(x.detach()).contiguous()
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients by parameter name. None of torch's: its layers are not fused, so their
        names and shapes differ from those of one process.
        """
        if self.way.startswith("torch"):
            return {}
        return {name: each.grad for name, each in self.module.named_parameters()}

    def error(self) -> float:
        """Returns the largest relative error of output and gradients, compared with one process in
        float32.
        """
        generator = torch.Generator(self.device).manual_seed(2)
        shape = (1 if self.spec is WIDE else 2, self.spec.context_length, self.spec.d_model)
        whole = torch.randn(shape, generator=generator, device=self.device)
        upstream = torch.randn(shape, generator=generator, device=self.device)
        unsplit = whole_blocks(self.spec, self.device, self.dtype).float()
        expected_in = whole.to(self.dtype).float().clone().requires_grad_()
        expected = unsplit(expected_in)
        expected.backward(upstream.to(self.dtype).float())
        x = self.part(whole.to(self.dtype)).requires_grad_()
        found = self.module(x)
        found.backward(self.part(upstream.to(self.dtype)))
        pairs = [(found, self.part(expected)), (x.grad, self.part(expected_in.grad))]
        for name, gradient in self.gradients().items():
            whole_gradient = unsplit.get_parameter(name).grad
            part = self.cut.part(name, whole_gradient) if self.cut else whole_gradient
            pairs.append((gradient, part))
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    def times(self, steps: int) -> dict[str, Any]:
        """Returns ms per step, with the host waiting after each step (`steps_ms`) and after
        STEPS_PER_WAIT steps (`ahead_ms`), and the GPU's mean clock and power during both.
        """
        shape = (1, self.spec.context_length, self.spec.d_model)
        x = self.part(torch.randn(shape, device=self.device, dtype=self.dtype))

        def step() -> None:
            y = self.module(x)
            y.backward(torch.ones_like(y))
            for parameter in self.module.parameters():
                parameter.grad = None

        step()  # compiles
        restart_hang_timer()
        run = step
        if self.way in GRAPHS and self.device.type == "cuda":
            run = self.captured(x)
            restart_hang_timer()

        def step_group() -> None:
            for _ in range(STEPS_PER_WAIT):
                run()

        with ClockReader(self.device) as by_step:
            found = time_phases({"both": run}, self.device, warmup=3, steps=steps)["step"]
        with ClockReader(self.device) as by_group:
            several = time_phases(
                {"steps": step_group}, self.device, warmup=1, steps=steps // STEPS_PER_WAIT + 1
            )
        times = {"steps_ms": found, "ahead_ms": [ms / STEPS_PER_WAIT for ms in several["step"]]}
        return {**times, "steps_clock": by_step.means(), "ahead_clock": by_group.means()}

    def captured(self, x: Tensor) -> Callable[[], None]:
        """Captures the step in one CUDA graph and returns the replay. Raises AssertionError if it gives
        another output or other gradients; attention adds gradients in an order that varies.
        """
        parameters = list(self.module.parameters())

        def step() -> list[Tensor]:
            for parameter in parameters:
                parameter.grad = None
            y = self.module(x)
            y.backward(torch.ones_like(y))
            return [y.detach(), *(parameter.grad for parameter in parameters)]

        def captured_step() -> list[Tensor]:
            with captured_turns(dist.group.WORLD):
                return step()

        with on_capture_stream(self.device):
            for _ in range(3):
                expected = [tensor.clone() for tensor in step()]
        torch.cuda.synchronize()
        found, replay = record(captured_step, self.device)
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
        pairs = zip(found, expected, strict=True)
        error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        assert error < LARGEST_ERROR[self.dtype], f"the replayed step differs by {error:.2g}"
        return replay


class ClockReader(threading.Thread):
    """A context in which a thread reads the device's clock and power every 20 ms."""

    def __init__(self, device: torch.device):
        super().__init__(daemon=True)
        self._device, self._ended, self._seen = device, threading.Event(), []

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self._seen.append(clock_and_power(self._device))

    def __enter__(self) -> "ClockReader":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def means(self) -> dict[str, float]:
        names = self._seen[0] if self._seen else {}
        return {name: statistics.fmean(seen[name] for seen in self._seen) for name in names}


def whole_blocks(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> TransformerLM:
    """Returns our network's blocks, not split, with the same weights on every rank."""
    network = TransformerLM(
        spec, device=device, parts=parts_of(blocks_of(spec), spec.num_layers), seed=SEED
    )
    for parameter in network.parameters():
        if parameter.ndim == 1:  # gains of 1 would hide a wrong sum of their gradients
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator(device).manual_seed(1))
    return network.to(dtype)


def restart_hang_timer() -> None:
    """Ends this process, and with it the run, if this is not called again within HANG_S seconds."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def check(way: str, options: Options, device: torch.device) -> dict[str, float]:
    """Returns the relative errors of a way. Raises AssertionError if one is too large."""
    errors = {}
    cases = {"float32": (SMALL, torch.float32)}
    if not options.small:
        cases["bf16"] = (WIDE, torch.bfloat16)
    for name, (spec, dtype) in cases.items():
        restart_hang_timer()
        network = Network.of(way, options.attending(spec), device, dtype)
        errors[f"error_{name}"] = error = network.error()
        if error > LARGEST_ERROR[dtype]:
            raise AssertionError(f"{way} is wrong in {name}: relative error {error:.2g}")
    return errors


def run(way: str, options: Options, folder: str) -> dict[str, object]:
    """Runs on every rank: checks and times a way, and returns its row."""
    device = torch.device("cpu" if options.small else f"cuda:{torch.cuda.current_device()}")
    plan.LEAST_OVERLAPPED_BYTES = 0  # also where overlap is expected to lose
    plan.LEAST_ROWS = 0 if way.startswith("by piece") else LEAST_ROWS
    errors = check(way, options, device) if options.length == LENGTH else {}
    restart_hang_timer()
    dtype = torch.float32 if options.small else torch.bfloat16
    spec = options.attending(SMALL if options.small else full_size(options.length))
    network = Network.of(way, spec, device, dtype)
    if way == "torch async":
        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(dist.group.WORLD.group_name)
    if not options.small and way.startswith(
        "torch"
    ):  # DTensor of torch 2.11 fails on symbolic sizes
        for block in network.module.blocks:
            block.compile(dynamic=False)
    elif not options.small:
        compiled(network.module, "blocks")
    row = {"way": way, "length": options.length, "attention": options.attention, **errors}
    row |= network.times(2 if options.small else STEPS)
    if options.traces and not way.startswith("torch") and options.length == LENGTH:
        name = f"tensor_parallel_trace_{way.replace(' ', '-')}_{dist.get_rank()}.json.gz"
        trace(network, Path(folder) / name)
    return row


def trace(network: Network, path: Path) -> None:
    """Writes a trace of some steps of this rank."""
    restart_hang_timer()
    # with the host's operators, the host would take longer than the GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        network.times(0)
    profile.export_chrome_trace(str(path))


def measure(ways: list[str], options: Options, folder: str) -> None:
    """Runs on every rank. Rank 0 writes each row as soon as it is measured: times of the slowest
    rank, or the error of the first rank that failed.
    """
    torch.set_num_threads(1)
    for way in ways:
        torch.compiler.reset()
        row: dict[str, object] | str
        try:
            row = run(way, options, folder)
        except Exception as error:  # measure the other rows all the same
            row = f"{type(error).__name__}: {str(error)[:1500]}"
        rows: list[dict[str, object] | str] = [""] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        failed = [each for each in rows if isinstance(each, str)]
        found = (
            {"way": way, "length": options.length, "failed": failed[0]} if failed else slowest(rows)
        )
        if dist.get_rank() == 0:
            write(Path(folder), {"ranks": dist.get_world_size(), **found})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()


def slowest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines the rows of all ranks: the largest times and errors, the lowest clock."""
    found: dict[str, Any] = {name: rows[0][name] for name in ("way", "length", "attention")}
    found |= {key: max(row[key] for row in rows) for key in rows[0] if "error" in key}
    for name, median in (("steps_ms", "step_ms"), ("ahead_ms", "step_ahead_ms")):
        slowest_ms = [max(step) for step in zip(*(row[name] for row in rows), strict=True)]
        clock = name.replace("_ms", "_clock")
        found[clock] = min((row[clock] for row in rows), key=lambda seen: seen.get("MHz", 0.0))
        found |= {median: statistics.median(slowest_ms), name: slowest_ms}
    return found


def write(folder: Path, row: dict[str, object]) -> None:
    with (folder / "tensor_parallel.jsonl").open("a") as file:
        file.write(json.dumps({**row, "torch": torch.__version__}) + "\n")


def read(folder: Path) -> list[dict[str, object]]:
    path = folder / "tensor_parallel.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", nargs="+", type=int, help="[2, and 4 if there are]")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="also at these lengths")
    parser.add_argument("--traces", action="store_true", help="write a trace for each rank")
    parser.add_argument("--attention", choices=ATTENTIONS, default="sdpa")
    arguments = parser.parse_args()
    device, max_ranks = ("cpu", 2) if arguments.small else ("cuda", torch.cuda.device_count())
    if max(arguments.ranks or [1]) > max_ranks:
        parser.error(f"--ranks {max(arguments.ranks)}: {max_ranks} are possible here")
    for ranks in arguments.ranks or [n for n in (2, 4) if n <= max_ranks]:
        for length in (LENGTH, *arguments.lengths):
            ways = arguments.only if length == LENGTH else ["plain", "overlapped"]
            options = Options(length, arguments.small, arguments.traces, arguments.attention)
            measure_all(list(ways), options, ranks, device)


def measure_all(ways: list[str], options: Options, ranks: int, device: str) -> None:
    """Measures all ways. If a way ends the ranks, starts them again without it."""
    folder = Path(os.environ.get("OUT", ".")).resolve()
    before = len(read(folder))
    while ways:
        with contextlib.suppress(RankError):
            launch(measure, ways, options, str(folder), ranks=ranks, device=device)
        done = {row["way"] for row in read(folder)[before:]}
        ways = [way for way in ways if way not in done]
        if ways:  # the first of these ways ended a rank
            failed = {"ranks": ranks, "way": ways.pop(0), "length": options.length}
            write(folder, {**failed, "failed": f"a rank ended, or hung for {HANG_S} s"})
    print_rows(read(folder)[before:])


def print_rows(rows: list[dict[str, object]]) -> None:
    one_gpu = next((row for row in rows if row["way"] == "one GPU"), {})
    for row in rows:
        columns = {key: value for key, value in row.items() if key not in ("steps_ms", "ahead_ms")}
        for name in ("step_ms", "step_ahead_ms"):
            if name in one_gpu and name in row and row is not one_gpu:
                columns[f"throughput_by_{name}"] = one_gpu[name] / row[name] / row["ranks"]
        print(columns, flush=True)


if __name__ == "__main__":
    main()
