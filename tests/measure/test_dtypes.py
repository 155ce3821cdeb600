import torch
from torch import nn

from stepgauge.measure.dtypes import accumulation, probe


def test_types_under_autocast_are_told_where_they_change():
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))  # takes no hooks
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2), scripted)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(
                module(torch.ones(3, 4)), torch.zeros(3, dtype=torch.long)
            )

    found = {
        (f.what, f.path): f.dtype for f in probe(module, forward, lambda loss: loss.backward())
    }
    assert found["parameter", "0.weight"] == found["gradient", "0.weight"] == "float32"
    assert found["output", "0"] == found["output", "2"] == "bfloat16"
    assert found["loss", ""] == "float32"


def test_the_sums_are_the_published_ones():
    assert [f"{value:.4f}" for value in accumulation(torch.device("cpu")).values()] == [
        "10.0001",
        "9.9531",
        "10.0021",
        "10.0021",
    ]
