"""Dtypes of a step's tensors, and rounding errors of sums."""

import torch
from torch import nn

from stepgauge.measure.dtypes import accumulation, probe


def test_probe_finds_the_dtypes_under_autocast():
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))  # takes no hooks
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2), scripted)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(
                module(torch.ones(3, 4)), torch.zeros(3, dtype=torch.long)
            )

    tensors = probe(module, forward, lambda loss: loss.backward())
    dtypes = {(tensor.what, tensor.path): tensor.dtype for tensor in tensors}
    assert dtypes["parameter", "0.weight"] == dtypes["gradient", "0.weight"] == "float32"
    assert dtypes["output", "0"] == dtypes["output", "2"] == "bfloat16"
    assert dtypes["loss", ""] == "float32"


def test_sums_have_the_published_values():
    assert [f"{value:.4f}" for value in accumulation(torch.device("cpu")).values()] == [
        "10.0001",
        "9.9531",
        "10.0021",
        "10.0021",
    ]
