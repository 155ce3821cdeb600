"""Predicted steps beside those that others have published, of A100s that nobody here has: computing is
an H100's, by the ratio of published peaks.
"""

from pathlib import Path

import pytest

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec

ROOT = Path(__file__).parents[2]
DGX_A100 = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "dgx-a100.json"))


def gpt(heads, width, layers):
    """Returns a network of Megatron."""
    return ModelSpec(
        vocab_size=51200, context_length=2048, d_model=width, d_ff=4 * width, num_layers=layers,
        num_heads=heads, feed_forward="gelu", norm="layernorm", positions="learned",
        tied_head=True, attention_bias="all", feed_forward_bias=True,
    )  # fmt: skip


# Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM, table 1: billion parameters, heads, width, blocks, tensor, pipeline, GPUs, sequences,
# TFLOP/s per GPU on A100s of 80 GB, by the paper's formula, which counts recomputation.
MEGATRON = (
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
)


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[0]}b")
def test_published_throughputs_of_megatron(row):
    """The table has no micro-batches; one sequence is assumed. Operations are those of an H100, scaled by
    published peaks.
    """
    billions, heads, width, layers, tensor, stages, gpus, sequences, published = row
    model = gpt(heads, width, layers)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)
    data = gpus // tensor // stages
    passes = sequences // data
    axis = f"pp{stages} 1f1b m{passes}" if stages > 1 else ""
    spec = LayoutSpec(
        model=model, layout=f"dp{data} bucketed tp{tensor} {axis}",
        batch=sequences if axis else data, accumulation=1 if axis else passes,
        precision="bf16-master", optimizer="fused", checkpointing="blocks", device="cuda",
    )  # fmt: skip
    step_ms = predict_layout(spec, DGX_A100, shortened=True).median("step_ms")
    block = 1 + 2048 / (6 * width) + 51200 / (16 * layers * width)
    flops = 96 * sequences * 2048 * layers * width**2 * block
    assert abs(flops / gpus / step_ms / 1e9 / published - 1) < 0.14


# The configurations that calculon is validated with (calculon-ai/calculon, validation/seqsel/tab5),
# measured by Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
# table 5: heads, width, blocks, layout, sequences, seconds with all recomputed and with the
# attention's scores only. Our attention never keeps scores, so the latter is checkpointing none.
SEQUENCE_PARALLEL = {
    "22B": (64, 6144, 48, "tp8", 4, 1.42, 1.10),
    "175B": (96, 12288, 96, "tp8 pp8 interleaved v3 m64", 64, 18.13, 13.75),
}
# Their attention writes its scores to memory, which an attention kernel does not. Passes over them, in
# 16 bits, with masks of 8 bits: forward writes the scores (1), reads and writes them in softmax (2) and
# in dropout (2.5), and reads them for the output (1); backward reads them for the gradient of the values
# (1), writes (1), passes dropout (2.5) and softmax (3), and reads for those of queries and keys (2).
# Both ways of recomputing run forward twice.
PASSES = 2 * 6.5 + 9.5


@pytest.mark.parametrize("name", SEQUENCE_PARALLEL)
def test_configurations_that_calculon_is_validated_with(name):
    """docs/log/2026-11-29-cut-by-token.md has all rows; calculon reports a mean of 3.65 %."""
    heads, width, layers, layout, batch, *published = SEQUENCE_PARALLEL[name]
    stages = 8 if "pp8" in layout else 1
    scores = 2 * 2048**2 * heads / 8 * batch * layers / stages
    for checkpointing, seconds in zip(("blocks", "none"), published, strict=True):
        spec = LayoutSpec(
            model=gpt(heads, width, layers), layout=layout, batch=batch, optimizer="fused",
            precision="bf16-master", checkpointing=checkpointing, device="cuda",
        )  # fmt: skip
        step_ms = predict_layout(spec, DGX_A100, shortened=True).median("step_ms")
        step_ms += PASSES * DGX_A100.traffic(scores).us / 1e3
        assert abs(step_ms / 1e3 / seconds - 1) < 0.09
