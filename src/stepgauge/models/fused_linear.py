"""Several linear layers of one input, computed as one matrix product."""

from collections.abc import Sequence

import torch
from torch import nn


class FusedLinear(nn.Linear):
    """A linear layer whose output is the concatenation of several outputs.

    sections  widths of the outputs: rows of the weight, elements of the bias. Tensor parallelism
              shards each section, and converters of checkpoints split the weight by them.
    """

    def __init__(
        self,
        in_features: int,
        sections: Sequence[int],
        *,
        bias: bool = False,
        device: torch.device | None = None,
    ):
        super().__init__(in_features, sum(sections), bias=bias, device=device)
        self.sections = tuple(sections)
