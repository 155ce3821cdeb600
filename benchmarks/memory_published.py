"""Peaks that others published beside ours, predicted for the architecture they measured on.

    python benchmarks/memory_published.py          # a line a row; no GPU is needed

Sebastian Raschka measured ViT-L/16 of torchvision, with a head of 10 classes, on images of 224 x
224: scripts and logs in github.com/rasbt/pytorch-memory-optim (logs.md, torch 2.1 nightly). Its
figure is torch.cuda.max_memory_reserved() in GB of 1e9. Those scripts clear the gradients after the
forward pass, so that those of the step before are still there at its end; ours clears them before.
So the gradients, as large as the parameters, are added to the predicted peak.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from stepgauge.bench.memory import predicted
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.user_model import UserModel

# script: GB published, images a batch, precision here, optimizer here
PUBLISHED = {
    "01_pytorch-vit.py": (26.79, 64, "fp32", "adamw"),
    "01-2_pytorch-fabric.py": (26.84, 64, "fp32", "adamw"),
    "02_mixed-precision.py": (18.21, 64, "bf16", "adamw"),
    "03_bfloat16.py": (13.82, 64, "bf16-pure", "adamw"),
    "04_lower-batchsize.py": (5.69, 16, "bf16-pure", "adamw"),
    "05_gradient-accum.py": (3.91, 4, "bf16-pure", "adamw"),
    "06_sgd-with-scheduler.py": (2.02, 4, "bf16-pure", "sgd"),
}


class Block(nn.Module):
    """As torchvision's EncoderBlock; its dropout is 0 and left out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.first(x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, y_BTD, y_BTD, need_weights=False)[0]
        return x_BTD + self.mlp(self.second(x_BTD))


class ViT(nn.Module):
    """Layers and shapes of torchvision's vit_l_16, with the loss."""

    def __init__(self, width: int = 1024, heads: int = 16, layers: int = 24):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.patches(pixels).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.token.expand(len(pixels), -1, -1), x_BTD], dim=1) + self.positions
        x_BD = self.norm(self.blocks(x_BTD))[:, 0]
        return nn.functional.cross_entropy(self.head(x_BD), labels)


def _vit(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return ViT(), (torch.ones(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long))


def vit_64() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _vit(64)


def vit_16() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _vit(16)


def vit_4() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _vit(4)


def main() -> int:
    for script, (published, batch, precision, optimizer) in PUBLISHED.items():
        if sys.argv[1:] and script not in sys.argv[1:]:
            continue
        model = UserModel.read(f"{Path(__file__).resolve()}:vit_{batch}")
        record = predicted(
            MemorySpec(model=model, precision=precision, optimizer=optimizer, predict="sm80")
        )
        reserved, gradients = (
            record.metrics[name].median / 1e9
            for name in ("reserved_peak_bytes", "parameters_bytes")
        )
        error = 100 * ((reserved + gradients) / published - 1)
        print(f"| {script} | {batch} | {precision} | {optimizer} | {published:.2f} | {reserved:.2f} | "
              f"{reserved + gradients:.2f} | {error:+.1f} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
