"""What backward of compiled code keeps, on a model whose sizes are known by hand."""

import functools
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.measure.memory.compiled import KeptByGraphs

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)
ROWS, WIDTH = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.inner(x).relu()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def kept(model, run, x):
    """(module, operator, line, bytes) of the storages that are neither weights nor the batch."""
    notes = KeptByGraphs()
    known = {tensor.untyped_storage()._cdata for tensor in (x, *model.parameters())}
    found = {}
    with notes.noting():
        loss = run(x)
        for tensor, place in notes.of(loss):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                found[storage._cdata] = (place.module, place.operator, place.line, storage.nbytes())
    loss.backward()
    return list(found.values())


@pytest.mark.parametrize("again", ["the first time", "from the compiler's cache"])
def test_a_compiled_models_storages_are_told_by_module_operator_and_line(again):
    torch._dynamo.reset()
    model, x = Small(), torch.randn(ROWS, WIDTH)
    found = kept(model, torch.compile(model), x)
    # What any partition must keep: the inputs of the second and the third product, for the
    # gradients of their weights.
    told = {(module, operator, size) for module, operator, _, size in found}
    assert {(f"blocks.{n}", "relu", ROWS * WIDTH * 4) for n in (0, 1)} <= told
    assert all(
        line.startswith("measure/test_memory_compiled.py:") for _, operator, line, _ in found
    )
    assert sum(size for *_, size in found) <= 4 * ROWS * WIDTH * 4


def test_a_graph_that_runs_for_every_block_is_a_part_a_time_and_eager_code_is_told_by_its_node():
    torch._dynamo.reset()
    model, x = Small(), torch.randn(ROWS, WIDTH)
    for block in model.blocks:
        block.compile()
    found = kept(model, model, x)
    told = {(module, operator, size) for module, operator, _, size in found}
    # The first part's input is the batch; the last result is kept for its square, by autograd's own
    # node.
    assert {("graph.0", "input", ROWS * WIDTH * 4), ("graph.1", "input", ROWS * WIDTH * 4)} <= told
    assert ("", "PowBackward0", ROWS * WIDTH * 4) in told


class Checkpointed(nn.Module):
    def forward(self, x):
        """Its compiled graph keeps attention's random state, whose size is symbolic to the
        compiler.
        """
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        return checkpoint(attend, x, x, x, use_reentrant=False).square().sum()


def test_what_a_checkpoint_computes_again_is_not_kept():
    torch._dynamo.reset()
    model, x = Checkpointed(), torch.randn(2, 2, ROWS, WIDTH, requires_grad=True)
    found = kept(model, torch.compile(model), x)
    # neither attention's result nor its square's input
    assert sum(size for *_, size in found) < x.nbytes
