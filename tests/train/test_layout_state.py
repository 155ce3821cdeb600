"""A checkpoint's state uses the network's parameter names, so that it can be loaded under another
wrapper, compiled or not.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.wrappers import parallelise
from stepgauge.spec.model import ModelSpec
from stepgauge.train.build import decay_groups

SPEC = ModelSpec(
    vocab_size=11, context_length=4, d_model=8, d_ff=12, num_layers=1, num_heads=2, tied_head=True
)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(wrapper, seed, *, compiles):
    """Returns the network under a wrapper after one training step."""
    torch.manual_seed(seed)
    network = TransformerLM(SPEC)
    module = torch.compile(network, backend="eager") if compiles else network
    groups = functools.partial(decay_groups, weight_decay=0.1)
    parallel = parallelise(wrapper, module, groups, torch.optim.AdamW)
    tokens = torch.arange(8).view(2, 4)
    parallel.module(tokens, tokens).backward()
    parallel.optimizer.step()
    return parallel


def names_of_groups(state):
    return [group["params"] for group in state["optimizer"]["param_groups"]]


@pytest.mark.parametrize("wrapper", ["bucketed", "zero1", "zero2", "zero3"])
def test_state_has_the_names_of_the_uncompiled_network(one_rank, wrapper):
    compiled, alone = trained(wrapper, 0, compiles=True), trained("none", 0, compiles=False)
    other = trained(wrapper, 1, compiles=True)
    expected = alone.state()
    other.load(expected)
    for parallel in (compiled, other):
        state, share = parallel.state(), parallel.shares and parallel.shares()
        for found in (state, share) if share else (state,):
            assert names_of_groups(found) == names_of_groups(expected)
            assert found["model"].keys() == expected["model"].keys()
            assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
        torch.testing.assert_close(state["optimizer"]["state"], expected["optimizer"]["state"])
        torch.testing.assert_close(state["model"], expected["model"])
