"""A network of one's own, as --model examples/lstm.py:lstm takes it: a tagger over 64 tokens."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, tags: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, tags)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD, _ = self.lstm(self.embedding(tokens_BT))
        return self.head(hidden_BTD).flatten(0, 1)


def lstm():
    """The module, a batch of inputs and targets, and the loss that takes output and targets."""
    inputs_BT = torch.randint(1000, (16, 64))
    targets = torch.randint(12, (16 * 64,))
    return Tagger(), (inputs_BT, targets), nn.CrossEntropyLoss()
