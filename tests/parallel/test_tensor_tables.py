"""Tables of tensor parallel rules that would give wrong gradients or losses: they are refused, or
summed correctly. Networks on two ranks are compared with one process, in float64.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.runtime.launch import launch
from stepgauge.spec.plan.tensor import Rule, Section

WIDTH, HEAD_WIDTH = 8, 4


class Attention(nn.Module):
    """Attention with an additional whole parameter, which every rank uses on its own heads."""

    def __init__(self, extra):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm = nn.LayerNorm(HEAD_WIDTH) if extra == "q_norm" else nn.Identity()
        self.gate = nn.Linear(WIDTH, 1) if extra == "gate" else None
        self.scale = nn.Parameter(torch.ones(1)) if extra == "scale" else None

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q = self.q_norm(q)
        if self.scale is not None:
            q = q * self.scale
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        return self.o(mixed)


class FeedForward(nn.Module):
    """The features between `up` and `down` go through `function`, which is called with the module,
    its input and the features.
    """

    def __init__(self, function=lambda module, x, h: module.act(h), act=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.function, self.act = function, act or nn.GELU()

    def forward(self, x):
        return self.down(self.function(self, x, self.up(x)))


class Network(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).square().mean()


COLUMN, ROW, GATHER, HEADS, WHOLE = map(Rule, ("column", "row", "gather", "heads", "whole"))
ATTENTION = {
    "blocks.*.[qkv]": Rule("column", (Section(WIDTH, unit=HEAD_WIDTH),)),
    "blocks.*.o": ROW,
}
FEED_FORWARD = {"blocks.*.up": COLUMN, "blocks.*.down": ROW}


def build(block):
    torch.manual_seed(1)
    return Network(block).double()


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float64)


def difference(block, table, prepare=lambda module: None):
    """Returns the largest difference in loss and gradients between two ranks and one process."""
    whole = build(block)
    parallel = parallelize_tensor(copy.deepcopy(whole), table)
    prepare(parallel.module)
    expected, loss = whole(batch()), parallel.module(batch())
    expected.backward()
    loss.backward()
    differences = [(loss - expected).abs().item()]
    for name, parameter in whole.named_parameters():
        gradient = parallel.module.get_parameter(name).grad
        differences.append((gradient - parallel.part(name, parameter.grad)).abs().max().item())
    return max(differences)


def differences_of_nested_rules():
    around = {"blocks.*": GATHER, "blocks.[01]": HEADS}
    return {
        "scale": difference(lambda: Attention("scale"), ATTENTION | around),
        "gate": difference(lambda: Attention("gate"), ATTENTION | around),
        "whole inside heads": difference(
            lambda: nn.Sequential(FeedForward(), nn.LayerNorm(WIDTH)),
            {
                "blocks.*": HEADS,
                "blocks.*.1": WHOLE,
                "blocks.*.0.up": COLUMN,
                "blocks.*.0.down": ROW,
            },
        ),
    }


def test_heads_around_a_row_sums_only_gradients_of_which_a_rank_has_a_part():
    for differences in launch(differences_of_nested_rules, ranks=2):
        assert {name: value for name, value in differences.items() if value >= 1e-12} == {}
