"""Networks cut into stages, for the pipeline tests."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.models.bert import NOT_MASKED, BertForMaskedLM
from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec

BATCH, LENGTH, VOCABULARY = 8, 5, 11


def cut(layers, stages):
    """Splits the layers into groups of about equal size, the first ones larger."""
    sizes = [len(layers) // stages + (n < len(layers) % stages) for n in range(stages)]
    starts = [sum(sizes[:n]) for n in range(stages)]
    return [layers[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Part(nn.Module):
    """A stage of a Transformer: some blocks, with optional modules before and after them."""

    def __init__(self, blocks, before=None, after=None, checkpointed=False):
        super().__init__()
        self.blocks, self.before, self.after = nn.ModuleList(blocks), before, after
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.before(x) if self.before else x
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, None, use_reentrant=False)
            else:
                x = block(x, None)
        return self.after(x) if self.after else x


class Before(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class BertBefore(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.types, self.norm = model.types, model.norm

    def forward(self, tokens):
        types = self.types(torch.zeros_like(tokens))
        return self.norm(self.tokens(tokens) + types + self.positions.weight[: tokens.shape[1]])


class BertAfter(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.transform, self.norm, self.head = model.transform, model.transform_norm, model.head

    def forward(self, x):
        return self.head(self.norm(F.gelu(self.transform(x))))


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_MASKED)


def masked(targets):
    return (targets != NOT_MASKED).sum()


class Several(nn.Module):
    """Takes and returns several tensors, one of them unchanged integers. One layer is called twice,
    one is frozen and one is unused.
    """

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.embed = nn.Embedding(VOCABULARY, 6) if first else None
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, VOCABULARY) if last else None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, x=None, y=None):
        self.calls += 1
        x = self.embed(tokens) if self.first else x
        y = x if self.first else y
        x = self.twice(torch.tanh(self.twice(x))) * self.scale + self.frozen(y)
        y = y + torch.sin(x)
        return self.head(x + y) if self.last else (tokens, x, y)


def shared_list(stages):
    """Returns stages that share modules: one block is in every stage, and one weight in the first
    and the last. Each stage writes into its input.
    """
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    embedding, head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
    head.weight = embedding.weight
    parts = [[nn.ReLU(inplace=True), block] for _ in range(stages)]
    parts[0].insert(0, embedding)
    parts[-1].append(head)
    return [nn.Sequential(*layers) for layers in parts]


def network(name, stages):
    """Returns the modules of the stages, their ties and `share`, of the network with that name."""
    torch.manual_seed(0)
    if name == "shared list":
        return shared_list(stages), (), None
    if name.startswith("list"):
        modules = [Several(n == 0, n == stages - 1) for n in range(stages)]
        return modules, (), None

    if name == "bert":
        shape = {"d_model": 8, "d_ff": 16, "num_heads": 2, "num_layers": stages}
        lengths = {"num_positions": LENGTH, "context_length": LENGTH}
        spec = BertSpec(vocab_size=VOCABULARY, dropout=0.0, **shape, **lengths)
        model = BertForMaskedLM(spec)
        before, after, share = BertBefore(model), BertAfter(model), masked
    else:
        spec = ModelSpec.preset("nano", d_model=8, d_ff=16, num_heads=2, num_layers=stages,
                                vocab_size=VOCABULARY, context_length=LENGTH, positions="learned",
                                tied_head="untied" not in name)  # fmt: skip
        model = TransformerLM(spec)
        before, after, share = Before(model), nn.Sequential(model.norm, model.head), None
    modules = [
        Part(blocks, checkpointed="checkpointed" in name)
        for blocks in cut(list(model.blocks), stages)
    ]
    modules[0].before, modules[-1].after = before, after
    if "compiled" in name:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    head = "after.head.weight" if name == "bert" else "after.1.weight"
    ties = () if "untied" in name else (((0, "before.tokens.weight"), (stages - 1, head)),)
    return modules, ties, share


def whole(modules, tokens):
    """Runs all stages one after the other, in one process."""
    values = (tokens,)
    for module in modules:
        values = module(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values[0]


def batch(seed):
    """Returns tokens, targets, and targets of which only some count, a different number in every
    micro-batch.
    """
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source)
    hidden = torch.rand((BATCH, LENGTH), generator=source) < 0.6
    hidden[:, 0] = False
    return tokens, targets, torch.where(hidden, NOT_MASKED, targets)
