"""Tables of rotary positions (Su et al. 2021, arXiv 2104.09864): cosines and sines of angles that grow
with the position. kernels/rotary rotates pairs of a head's features by these angles.

Legend: T sequence, R rotated features of a head.
"""

import torch
from torch import Tensor

from stepgauge.spec.model import ModelSpec
from stepgauge.spec.rope import RopeScaling


def rotary_tables(spec: ModelSpec, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Returns cos_TR and sin_TR of t · base^(-2i/R). Both halves are alike, except that the sines of
    the first half are negated.
    """
    device = device or torch.get_default_device()
    width, scaling = spec.rotary_width, RopeScaling.parse(spec.rope_scaling)
    # On the host, because not every accelerator has float64.
    frequencies = torch.tensor(
        [scaling.frequency(spec.rope_base ** (-i / width)) for i in range(0, width, 2)],
        device="cpu",
        dtype=torch.float64,
    )
    positions = torch.arange(spec.context_length, device="cpu", dtype=torch.float64)
    angle = positions[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    cos_TR, sin_TR = torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()
    return cos_TR.to(device), sin_TR.to(device)
