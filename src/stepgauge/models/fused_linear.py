"""Several linear layers of one input as one matrix product."""

from collections.abc import Sequence

import torch
from torch import nn


class FusedLinear(nn.Linear):
    """A linear layer whose output is several, one behind the other.

    sections  their widths: rows of the weight, elements of the bias. Whoever cuts the layer by
              rows cuts each section (tensor parallel), and whoever renames weights splits by them
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
