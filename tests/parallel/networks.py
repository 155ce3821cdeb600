"""Networks and the training loop of the tests in this folder, which compare ranks with one process."""

import torch
from torch import nn

from stepgauge.models.bert import BertForMaskedLM
from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec

MICRO_BATCHES, ROWS, STEPS = 2, 3, 3  # rows per rank and micro-batch


class Toy(nn.Module):
    """Has tied, frozen and unused parameters and a buffer, and uses its layers in another order than it
    registers them.
    """

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 6, bias=False)
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(6))

    def forward(self, tokens, targets):
        x = torch.tanh(self.first(self.embedding(tokens)) * self.scale)
        x = self.last(torch.tanh(self.frozen(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def toy():
    return Toy().double()


def transformer():
    spec = ModelSpec.preset("nano", vocab_size=7, context_length=5, tied_head=True)
    return TransformerLM(spec).double()


def small_bert():
    shape = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return BertForMaskedLM(BertSpec(vocab_size=7, num_positions=5, context_length=5, **shape))


def bert():
    return small_bert().double()


NETWORKS = {"toy": toy, "transformer": transformer, "bert": bert}


def make(name, *, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name]()


def batch(step, micro, rank):
    generator = torch.Generator("cpu").manual_seed(step * 100 + micro * 10 + rank)
    tokens = torch.randint(7, (2, ROWS, 5), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device()).unbind()


def optimizer_of(name, parameters):
    return (
        torch.optim.SGD(parameters, lr=0.3)
        if name == "sgd"
        else torch.optim.AdamW(parameters, lr=0.01)
    )


def train_alone(network, optimizer, ranks, *, clip):
    """Trains in one process on the batches of all ranks; returns losses, last gradients and weights."""
    model = make(network)
    sgd_or_adamw = optimizer_of(optimizer, [p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        sgd_or_adamw.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            for rank in range(ranks):
                loss = model(*batch(step, micro, rank)) / (MICRO_BATCHES * ranks)
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        sgd_or_adamw.step()
        losses.append(total)
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}
