"""Tensor parallel, ours beside torch's own, in one run: 8 blocks 4096 wide (feed-forward 11,008, 32
heads), one sequence of 8192 tokens, bf16 weights, forward and backward, on 1, 2 and 4 GPUs.

    python benchmarks/tensor_parallel_campaign.py           # about 4 minutes on 4 GPUs
    python benchmarks/tensor_parallel_campaign.py --small   # on a CPU: that it runs and is right

Writes a JSON line a row to $OUT/tensor_parallel.jsonl (the folder here where OUT is not set): ms of
the slowest rank, and the throughput of one GPU over that of one GPU alone, compiled. Before it is
timed, each layout's output and gradient are held against one process's, in float32.
"""

import json
import os
import statistics
import sys
from pathlib import Path

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

from stepgauge.measure.timing import time_phases
from stepgauge.models.rotary import rotary_tables, rotate
from stepgauge.models.transformer import TransformerLM, compiled
from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.runtime.launch import launch
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor_tables import table_of

LARGEST_ERROR = 1e-4  # relative, of float32
SEED = 0


def full_spec(small: bool) -> ModelSpec:
    shape = (64, 96, 4, 32, 2) if small else (4096, 11008, 32, 8192, 8)
    width, d_ff, heads, length, blocks = shape
    # One block more at each end, so that the blocks between are a stage without embedding and head.
    return ModelSpec(
        vocab_size=128,
        context_length=length,
        d_model=width,
        d_ff=d_ff,
        num_heads=heads,
        num_layers=blocks + 2,
    )


def blocks_of(spec: ModelSpec) -> range:
    return range(1, spec.num_layers - 1)


class TorchBlock(nn.Module):
    """A block as torch's tensor parallel takes it: each projection a layer of its own."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        d = spec.d_model
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.attention, self.ffn = TorchAttention(spec), TorchFeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class TorchAttention(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        d, self.head_width = spec.d_model, spec.head_width
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
    """The blocks, with the weights of ours."""

    def __init__(self, spec: ModelSpec, like: TransformerLM):
        super().__init__()
        device, dtype = next(like.parameters()).device, next(like.parameters()).dtype
        with device:
            self.blocks = nn.ModuleList(TorchBlock(spec) for _ in blocks_of(spec)).to(dtype)
        for block, ours in zip(self.blocks, like.blocks, strict=True):
            q, k, v = ours.attention.input.weight.detach().chunk(3)
            gate, up = ours.feed_forward.gate_up.weight.detach().chunk(2)
            pairs = {block.attention.wq: q, block.attention.wk: k, block.attention.wv: v}
            pairs |= {block.attention.wo: ours.attention.output.weight.detach()}
            pairs |= {block.ffn.w1: gate, block.ffn.w3: up}
            pairs |= {block.ffn.w2: ours.feed_forward.down.weight.detach()}
            for layer, weight in pairs.items():
                layer.weight.data.copy_(weight)
        cos, sin = rotary_tables(spec, device)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def torch_plan() -> dict[str, object]:
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


def build(provider: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The blocks on this rank's share of the ranks: x_BTD, of torch's own a piece of it, in."""
    ours = TransformerLM(spec, device=device, blocks=blocks_of(spec), seed=SEED).to(dtype)
    for parameter in ours.parameters():
        if parameter.ndim == 1:  # gains of one would hide a wrong sum of their gradients
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator(device).manual_seed(1))
    ranks = dist.get_world_size()
    if provider.startswith("ours"):
        if ranks > 1:
            parallelize_tensor(ours, table_of(spec, blocks_of(spec)))
        return ours
    theirs = TorchStack(spec, ours)
    for block, other in zip(theirs.blocks, ours.blocks, strict=True):
        block.attention_norm.weight.data.copy_(other.attention_norm.weight.detach())
        block.ffn_norm.weight.data.copy_(other.feed_forward_norm.weight.detach())
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,))
        for block in theirs.blocks:
            parallelize_module(block, mesh, torch_plan())
    return theirs


def input_of(provider: str, whole: Tensor) -> Tensor:
    if provider.startswith("ours"):
        return whole
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def check(provider: str, small: ModelSpec, device: torch.device) -> float:
    """The largest relative error of output and gradient of the input, against one process."""
    generator = torch.Generator(device).manual_seed(2)
    shape = (2, small.context_length, small.d_model)
    whole = torch.randn(shape, generator=generator, device=device)
    upstream = torch.randn(shape, generator=generator, device=device)
    alone = TransformerLM(small, device=device, blocks=blocks_of(small), seed=SEED)
    for parameter in alone.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator(device).manual_seed(1))
    expected_in = whole.clone().requires_grad_()
    expected = alone(expected_in)
    expected.backward(upstream)
    x = input_of(provider, whole).requires_grad_()
    found = build(provider, small, device, torch.float32)(x)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found.backward(upstream.chunk(ranks, 1)[rank])
    grad = expected_in.grad
    if not provider.startswith("ours"):
        grad = grad.chunk(ranks, 1)[rank]
    pairs = ((found, expected.chunk(ranks, 1)[rank]), (x.grad, grad))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def time_one(provider: str, small: bool) -> list[float]:
    """ms of forward and backward, one value a step, after the check."""
    device = torch.device("cpu" if small else f"cuda:{torch.cuda.current_device()}")
    error = check(provider, full_spec(small=True), device)
    if error > LARGEST_ERROR:
        raise AssertionError(f"{provider} is wrong: relative error {error:.2g}")
    spec, dtype = full_spec(small), torch.float32 if small else torch.bfloat16
    model = build(provider, spec, device, dtype)
    is_async = "async" in provider
    if is_async:
        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(dist.group.WORLD.group_name)
    if "compiled" in provider:
        compiled(model, "blocks")
    shape = (1, spec.context_length, spec.d_model)
    x = input_of(provider, torch.randn(shape, device=device, dtype=dtype))
    held: dict[str, Tensor] = {}

    def forward() -> None:
        held["y"] = model(x)

    def backward() -> None:
        y = held.pop("y")
        y.backward(torch.ones_like(y))
        for parameter in model.parameters():
            parameter.grad = None

    phases = {"forward": forward, "backward": backward}
    return time_phases(phases, device, warmup=1 if small else 5, steps=2 if small else 15)["step"]


def measure(providers: list[str], small: bool) -> dict[str, list[float] | str]:
    """Times by provider; why one failed, where it did on any rank."""
    found: dict[str, list[float] | str] = {}
    for provider in providers:
        torch.compiler.reset()
        try:
            outcome: list[float] | str = time_one(provider, small)
        except Exception as error:  # the other rows are worth having
            outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        outcomes: list[list[float] | str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        failed = [each for each in outcomes if isinstance(each, str)]
        slowest = [max(step) for step in zip(*outcomes, strict=True)] if not failed else []
        found[provider] = failed[0] if failed else slowest
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def main() -> None:
    small = "--small" in sys.argv
    device, gpus = ("cpu", 2) if small else ("cuda", torch.cuda.device_count())
    path = Path(os.environ.get("OUT", ".")) / "tensor_parallel.jsonl"
    alone = None
    with path.open("a") as file:
        for ranks in [n for n in (1, 2, 4) if n <= gpus]:
            providers = ["ours eager", "torch eager"] if small else ["ours eager", "ours compiled"]
            if not small:
                providers += ["torch compiled", *(["torch compiled async"] if ranks > 1 else [])]
            found = launch(measure, providers, small, ranks=ranks, device=device)[0]
            for provider, outcome in found.items():
                row = {"ranks": ranks, "provider": provider, "torch": torch.__version__}
                if isinstance(outcome, str):
                    row["failed"] = outcome
                else:
                    row |= {"step_ms": statistics.median(outcome), "steps_ms": outcome}
                    if ranks == 1 and "compiled" in provider:
                        alone = min(alone or row["step_ms"], row["step_ms"])
                    if alone:
                        row["throughput_a_gpu"] = alone / row["step_ms"] / ranks
                file.write(json.dumps(row) + "\n")
                file.flush()
                print({key: value for key, value in row.items() if key != "steps_ms"}, flush=True)


if __name__ == "__main__":
    main()
