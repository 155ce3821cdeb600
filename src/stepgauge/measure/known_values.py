"""Known values that collectives send, and the comparison with what has arrived."""

import torch
from torch import Tensor

from stepgauge.spec.units import ceil_div

# Period of the pattern: a prime, so that swapped chunks of usual sizes are detected.
PERIOD = 1021
_SLICE = 1 << 24  # elements that are checked at once


def pattern(rank: int, device: torch.device) -> Tensor:
    """Returns one period of the rank's input: small whole numbers, exact in every dtype."""
    index = torch.arange(PERIOD, device=device)
    return ((index * index * 7 + index * 3) % 11 % 4).roll(37 * rank)


def tile(tensor: Tensor, period: Tensor, offset: int) -> None:
    """Sets tensor[i] = period[(offset + i) % PERIOD]."""
    for start in range(0, tensor.numel(), _SLICE):
        piece = tensor[start : start + _SLICE]
        rolled = period.roll(-((offset + start) % PERIOD)).to(tensor.dtype)
        piece.copy_(rolled.repeat(ceil_div(piece.numel(), PERIOD))[: piece.numel()])


def differing(tensor: Tensor, period: Tensor, offset: int) -> int:
    """Returns the number of elements that differ from the tiled period."""
    expected = torch.empty(min(_SLICE, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    wrong = 0
    for start in range(0, tensor.numel(), _SLICE):
        piece = tensor[start : start + _SLICE]
        tile(expected[: piece.numel()], period, offset + start)
        wrong += int((piece != expected[: piece.numel()]).sum())
    return wrong
