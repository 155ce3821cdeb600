"""A residual network of images, as --model examples/resnet.py:resnet takes it."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, narrow: int, wide: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])
        same = stride == 1 and narrow == wide
        self.shortcut = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(x_BCHW)))
        return torch.relu(self.norms[1](self.second(hidden)) + self.shortcut(x_BCHW))


def network() -> nn.Module:
    widths = (16, 16, 32, 64)
    blocks = [
        Block(narrow, wide, 1 if narrow == wide else 2)
        for narrow, wide in itertools.pairwise(widths)
    ]
    stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    return nn.Sequential(stem, *blocks, *head)


def images(number: int) -> tuple[Tensor, Tensor]:
    """A batch of 32 images, whose class is the brightest of ten stripes."""
    generator = torch.Generator(device="cpu").manual_seed(number)
    images_BCHW = torch.randn(32, 3, 30, 30, generator=generator, device="cpu")
    stripes = images_BCHW.mean(dim=(1, 2)).view(32, 10, 3).mean(dim=2)
    return images_BCHW, stripes.argmax(dim=1)


def resnet() -> dict[str, Any]:
    """Batches of their own for each step and rank, two held out, and an optimizer."""
    return {
        "module": network(),
        "batches": images,
        "held_out": [images(-1), images(-2)],
        "loss": nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    }
