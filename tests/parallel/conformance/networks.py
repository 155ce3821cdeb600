"""Small networks with the unusual features of real ones."""

import dataclasses
import datetime

import torch
import torch.distributed as dist
from tests.parallel.conformance.training import WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):
    """A residual block with a matrix, a bias and a gain; `expert` selects one of two more layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x, expert=None):
        y = torch.tanh(self.linear(x)) * self.gain
        return x + (y if expert is None else self.experts[expert](y))


def call_block(block, x, expert):
    return block(x, expert)


class Net(nn.Module):
    """Blocks between an embedding and a head. `blocks` selects the blocks that are used, and `expert`
    the expert of each; `call_block` calls a block.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.call_block = call_block
        self.double()

    def forward(self, x, *, blocks=(0, 1, 2), expert=None):
        x = self.embedding(x)
        for index in blocks:
            x = self.call_block(self.blocks[index], x, expert)
        return self.head(x)


def call_checkpointed(block, x, expert):
    return checkpoint(block, x, expert, use_reentrant=False)


def call_checkpointed_reentrant(block, x, expert):
    return checkpoint(block, x, expert, use_reentrant=True)


def call_checkpointed_selectively(block, x, expert):
    def contexts():
        return create_selective_checkpoint_contexts(
            [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        )

    return checkpoint(block, x, expert, use_reentrant=False, context_fn=contexts)


class Stack(nn.Module):
    """Layers one after another, called by `call_layer`."""

    def __init__(self, make, call_layer=lambda layer, x: layer(x)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(3)).double()
        self.call_layer = call_layer

    def forward(self, x):
        for layer in self.layers:
            x = self.call_layer(layer, x)
        return x


class PartlyCheckpointed(nn.Module):
    """A layer that checkpoints a part of itself."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.linear, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return x + checkpoint(lambda x: torch.tanh(self.mlp(x)), y, use_reentrant=self.reentrant)


class WritesInput(nn.Module):
    """A partly or wholly frozen layer that writes its input."""

    def __init__(self, trained=True):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=trained)

    def forward(self, x):
        x += 1.0
        return torch.tanh(self.linear(x)) * self.gain


class ReturnsInput(Block):
    """A layer that returns its input in addition to its output; if dropped, also as its output."""

    def forward(self, x, is_dropped=False):
        return (x if is_dropped else super().forward(x)), x


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=2):
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x


@dataclasses.dataclass(slots=True)
class Slots:
    y: torch.Tensor


class SlotsOutput(Block):
    def forward(self, x):
        return Slots(super().forward(x.y if isinstance(x, Slots) else x))


class Tied(nn.Module):
    """Embedding and head have the same matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        y = self.embedding(x)
        for block in self.blocks:
            y = torch.tanh(block(y))
        return self.head(y @ self.embedding.weight)


class OddShapes(nn.Module):
    """Parameters of one to three dimensions: an empty one, one that is transposed in memory, two whose
    gradients share memory, and one with an expanded gradient.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(7, WIDTH).t())
        self.first, self.second = (nn.Parameter(torch.randn(7)) for _ in range(2))
        self.cube = nn.Parameter(torch.randn(1, 7, 1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.double()

    def forward(self, x):
        y = torch.tanh(x @ self.matrix) + (self.first.view(-1) + self.second.view(-1))
        return y * self.cube[0, :, 0] + self.cube.sum() + self.empty.sum()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.linear = nn.Linear(WIDTH, 3).double()

    def forward(self, x):
        return self.linear(x) * self.scale


class MixedDtypes(nn.Module):
    """Has float64 and float32 layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(WIDTH, 5).to(torch.float64)
        self.narrow = nn.Linear(5, 5).to(torch.float32)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)).float()).double()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.complex128))

    def forward(self, x):
        return torch.view_as_real(x.to(torch.complex128) @ self.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True).double()

    def forward(self, x):
        return self.lstm(x[None])[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x[None])[0]
        return x


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 5).double())

    def forward(self, x):
        return self.linear(x)


class Lookup(nn.Module):
    def __init__(self, **how):
        super().__init__()
        torch.manual_seed(0)
        self.lookup = nn.Embedding(9, 4, **how).double()

    def forward(self, x):
        return self.lookup((x.abs() * 3).long().clamp(max=8))


class DictOutput(nn.Module):
    """Returns a dictionary with a nested list."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, *, inputs):
        y = self.net(inputs)
        return {"parts": [y, y * 2]}


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 1)])
        self.double()

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


class _BarrierInBackward(torch.autograd.Function):
    """The identity, whose backward has a collective of a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(torch.zeros(1), group=ctx.group)
        return gradient, None


class MeetsInBackward(nn.Module):
    """Uses the first `layers` layers. Their backward has a collective after the first layer."""

    def __init__(self, meets):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12)).double()
        self.group = dist.new_group(timeout=datetime.timedelta(seconds=60)) if meets else None

    def forward(self, x, *, layers):
        for number, layer in enumerate(self.layers[:layers]):
            x = torch.tanh(layer(x))
            if self.group and number == 0:
                x = _BarrierInBackward.apply(x, self.group)
        return x
