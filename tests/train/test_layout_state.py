"""A checkpoint's state goes by names into a network on the data axis, compiled as a whole or not."""

import functools

import pytest
import torch

from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.training import single_process
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.train.build import decay_groups
from stepgauge.train.layout import layout_state_of

SPEC = ModelSpec(
    vocab_size=11, context_length=4, d_model=8, d_ff=12, num_layers=1, num_heads=2, tied_head=True
)


def built(seed, compile):
    torch.manual_seed(seed)
    module = TransformerLM(SPEC)
    groups = functools.partial(decay_groups, weight_decay=0.1)
    return module, single_process(compile(module), groups, torch.optim.AdamW)


@pytest.mark.parametrize("compile", [torch.compile, lambda module: module])
def test_names_are_those_without_torch_compile(compile):
    tokens = torch.arange(8).view(2, 4)
    given, parallel = built(0, lambda module: module)
    given(tokens, tokens).backward()
    parallel.optimizer.step()
    module, other = built(1, compile)
    layout_state_of(other.module, other, Layout()).load(parallel.state())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, given.state_dict()[name])
    parameters = zip(given.parameters(), module.parameters(), strict=True)
    for theirs, ours in parameters:
        torch.testing.assert_close(other.optimizer.state[ours], parallel.optimizer.state[theirs])
