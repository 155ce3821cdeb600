"""Compares the time of our model's step with the same network in the transformers library.

    PYTHONPATH=src python benchmarks/step_vs_transformers.py OUT.jsonl [--sizes small 2.7b]
    [--device cuda]

Both models run in our TrainingStep (bf16 autocast, torch's fused AdamW) in one process on one GPU,
eager and compiled, one after the other. First both get the same weights, and their fp32 logits must
agree; if they do not, no time is printed. Appends a record per row to OUT.jsonl and prints a table.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from stepgauge.bench.build import LEARNING_RATE, make_batch
from stepgauge.bench.sweep import stamped
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import time_phases
from stepgauge.models.parts import NORM_EPSILON, build_optimizer
from stepgauge.models.transformer import TransformerLM
from stepgauge.report.views import record_table
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep


class Peer(nn.Module):
    """transformers' Llama of the same shape with the same loss."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        super().__init__()
        config = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.d_ff,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            max_position_embeddings=spec.context_length,
            rms_norm_eps=NORM_EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_base},
            attn_implementation="sdpa",
            use_cache=False,
            tie_word_embeddings=False,
        )
        with device:
            self.network = LlamaForCausalLM(config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        logits_BTV = self.network(input_ids=tokens_BT, use_cache=False).logits
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def copy_from(self, model: TransformerLM) -> None:
        """Copies our weights. Splits our fused projections, because transformers has one for each."""
        network = self.network.model
        network.embed_tokens.weight.copy_(model.embedding.weight)
        network.norm.weight.copy_(model.norm.weight)
        self.network.lm_head.weight.copy_(model.head.weight)
        for peer_block, block in zip(network.layers, model.blocks, strict=True):
            attention, feed_forward = peer_block.self_attn, peer_block.mlp
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            for part, weight in zip(parts, block.attention.input.weight.chunk(3), strict=True):
                part.weight.copy_(weight)
            for part, weight in zip(
                (feed_forward.gate_proj, feed_forward.up_proj),
                block.feed_forward.gate_up.weight.chunk(2),
                strict=True,
            ):
                part.weight.copy_(weight)
            attention.o_proj.weight.copy_(block.attention.output.weight)
            feed_forward.down_proj.weight.copy_(block.feed_forward.down.weight)
            peer_block.input_layernorm.weight.copy_(block.attention_norm.weight)
            peer_block.post_attention_layernorm.weight.copy_(block.feed_forward_norm.weight)


@torch.no_grad()
def check_same(spec: ModelSpec, device: torch.device) -> float:
    """Returns the relative difference of the fp32 logits with equal weights. Raises SystemExit if it
    shows that the networks are not the same.
    """
    small = dataclasses.replace(spec, num_layers=2)
    model, peer = TransformerLM(small, device=device), Peer(small, device)
    peer.copy_from(model)
    counts = [sum(p.numel() for p in each.parameters()) for each in (model, peer)]
    tokens = torch.randint(small.vocab_size, (2, small.context_length), device=device)
    expected = peer(tokens)
    error = ((model(tokens) - expected).norm() / expected.norm()).item()
    if error > 1e-4 or counts[0] != counts[1]:
        raise SystemExit(
            f"not the same network: relative difference {error:.2e}, parameters {counts}"
        )
    return error


def rows(size: str, device: torch.device, seconds: float, context: int) -> Iterator[Record]:
    """Yields a record for each model, eager and compiled. Each is built, timed and freed in turn."""
    model_spec = ModelSpec.preset(size, context_length=context)
    error = check_same(model_spec, device)
    for compile_mode in ("off", "on"):
        spec = StepSpec(
            model=model_spec,
            size=size,
            precision="bf16",
            compile=compile_mode,
            device=str(device),
            seconds=seconds,
        )
        for name, build in (("stepgauge", lambda: TransformerLM(model_spec, device=device)),
                            ("transformers", lambda: Peer(model_spec, device))):  # fmt: skip
            times, peak = measure(spec, build(), device)
            yield stamped(
                Record(
                    kind="step-peer",
                    spec={**dataclasses.asdict(spec), "implementation": name},
                    metrics={
                        **{
                            f"{phase}_ms": Sample.of(values, "ms")
                            for phase, values in times.items()
                        },
                        "peak_bytes": Sample.exact(peak or 0, "bytes"),
                        "logit_error": Sample.exact(error, "relative"),
                    },
                    environment=environment(device),
                )
            )


def measure(
    spec: StepSpec, model: nn.Module, device: torch.device
) -> tuple[dict[str, list[float]], int | None]:
    torch._dynamo.reset()
    devices.reset_peak_memory(device)
    optimizer = build_optimizer(spec.optimizer, model.parameters(), lr=LEARNING_RATE)
    loss = torch.compile(model) if spec.compile == "on" else model
    step = TrainingStep(model, optimizer, PRECISIONS[spec.precision], device, compute_loss=loss)
    phases = step.phases(make_batch(spec, device), until=spec.phases)
    times = time_phases(phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds)
    return times, devices.peak_memory(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["small", "2.7b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    records = []
    with arguments.out.open("a") as file:
        for size in arguments.sizes:
            for record in rows(
                size, torch.device(arguments.device), arguments.seconds, arguments.context
            ):
                records.append(record)
                print(record.to_json(), file=file, flush=True)
    print(record_table(records).to("markdown"))


if __name__ == "__main__":
    main()
