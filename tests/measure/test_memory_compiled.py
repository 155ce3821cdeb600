"""Tensors that compiled code keeps for backward, on a model with known sizes."""

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
    """Returns (module, operator, line, bytes) of the kept storages except weights and the batch."""
    graphs = KeptByGraphs()
    excluded = {tensor.untyped_storage()._cdata for tensor in (x, *model.parameters())}
    rows = {}
    with graphs.noting():
        loss = run(x)
        for tensor, origin in graphs.of(loss):
            storage = tensor.untyped_storage()
            if storage._cdata not in excluded:
                rows[storage._cdata] = (
                    origin.module, origin.operator, origin.line, storage.nbytes(),
                )  # fmt: skip
    loss.backward()
    return list(rows.values())


@pytest.mark.parametrize("run", ["the first time", "from the compiler's cache"])
def test_kept_tensors_of_a_compiled_model_have_module_operator_and_line(run):
    torch._dynamo.reset()
    model, x = Small(), torch.randn(ROWS, WIDTH)
    rows = kept(model, torch.compile(model), x)
    # Every partition must keep the inputs of the second and third product, for the gradients of
    # their weights.
    made = {(module, operator, size) for module, operator, _, size in rows}
    assert {(f"blocks.{n}", "relu", ROWS * WIDTH * 4) for n in (0, 1)} <= made
    assert all(line.startswith("measure/test_memory_compiled.py:") for _, _, line, _ in rows)
    assert sum(size for *_, size in rows) <= 4 * ROWS * WIDTH * 4


def test_runs_of_a_repeated_graph_are_numbered_and_eager_code_has_its_autograd_node():
    torch._dynamo.reset()
    model, x = Small(), torch.randn(ROWS, WIDTH)
    for block in model.blocks:
        block.compile()
    made = {(module, operator, size) for module, operator, _, size in kept(model, model, x)}
    # The first graph's input is the batch. The last result is kept for its square by autograd's own
    # node.
    assert {("graph.0", "input", ROWS * WIDTH * 4), ("graph.1", "input", ROWS * WIDTH * 4)} <= made
    assert ("", "PowBackward0", ROWS * WIDTH * 4) in made


class Checkpointed(nn.Module):
    def forward(self, x):
        """The compiled graph keeps attention's random state, whose size is symbolic for the
        compiler.
        """
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        return checkpoint(attend, x, x, x, use_reentrant=False).square().sum()


def test_recomputed_tensors_of_a_checkpoint_are_not_kept():
    torch._dynamo.reset()
    model, x = Checkpointed(), torch.randn(2, 2, ROWS, WIDTH, requires_grad=True)
    # It keeps neither attention's result nor the input of its square.
    assert sum(size for *_, size in kept(model, torch.compile(model), x)) < x.nbytes
