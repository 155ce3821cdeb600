"""A decoder-only Transformer language model, built from a ModelSpec and the parts that it names.

Legend: B batch, T sequence, D model width, H heads, W head width, F feed-forward width, V
vocabulary.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.models.checkpointing import Through, in_order
from stepgauge.models.parts import ATTENTIONS, LOSSES, NORMS
from stepgauge.ranges import ranged
from stepgauge.spec.model import ModelSpec

ROPE_BASE = 10_000.0  # Su et al. 2021, RoFormer


class TransformerLM(nn.Module):
    """Pre-norm decoder. `forward(tokens_BT)` gives logits_BTV, `forward(tokens_BT, targets_BT)` the
    mean loss.
    """

    def __init__(self, spec: ModelSpec, *, device: torch.device | None = None):
        super().__init__()
        self.spec = spec
        self.compute_loss = LOSSES[spec.loss]
        # or one that keeps less for backward: models.checkpointing
        self.through_blocks: Through = in_order
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model, device=device)
        self.positions = (
            nn.Embedding(spec.context_length, spec.d_model, device=device)
            if spec.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(spec, device) for _ in range(spec.num_layers))
        self.norm = NORMS[spec.norm](spec.d_model, device=device)
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False, device=device)
        if spec.tied_head:
            self.head.weight = self.embedding.weight
        if spec.positions == "rope":
            cos_TW, sin_TW = rotary_tables(spec.context_length, spec.head_width, device)
            self.cos_TW: Tensor
            self.sin_TW: Tensor
            self.register_buffer("cos_TW", cos_TW, persistent=False)
            self.register_buffer("sin_TW", sin_TW, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02; those that write to the residual stream smaller by
        sqrt(2L) (GPT-2).
        """
        residual = 0.02 / math.sqrt(2 * self.spec.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(
                    std=residual if name.endswith(("output.weight", "down.weight")) else 0.02
                )

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        length = tokens_BT.shape[1]
        rotation = None
        if self.positions is None:
            dtype = compute_dtype(x_BTD)
            rotation = (self.cos_TW[:length].to(dtype), self.sin_TW[:length].to(dtype))
        else:
            x_BTD = x_BTD + self.positions.weight[:length]
        x_BTD = self.through_blocks(self.blocks, x_BTD, rotation)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD)
        return self.compute_loss(x_BTD, self.head.weight, targets_BT)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        self.attention_norm = NORMS[spec.norm](spec.d_model, device=device)
        self.attention = Attention(spec, device)
        self.feed_forward_norm = NORMS[spec.norm](spec.d_model, device=device)
        self.feed_forward = FEED_FORWARDS[spec.feed_forward](spec, device)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Attention(nn.Module):
    """Causal multi-head attention; query, key and value projections are one matrix product."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        self.head_width = spec.head_width
        self.attend = ATTENTIONS[spec.attention]
        self.input = nn.Linear(spec.d_model, 3 * spec.d_model, bias=False, device=device)
        self.output = nn.Linear(spec.d_model, spec.d_model, bias=False, device=device)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        # Query and key heads stay one tensor until they are rotated: half the launches.
        heads_BHTW = self.input(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        num_heads = heads_BHTW.shape[1] // 3
        qk_BHTW, v_BHTW = heads_BHTW.split((2 * num_heads, num_heads), dim=1)
        if rotation is not None:
            with ranged("rotation"):
                qk_BHTW = rotate(qk_BHTW, *rotation)
        q_BHTW, k_BHTW = qk_BHTW.chunk(2, dim=1)
        return self.output(self.attend(q_BHTW, k_BHTW, v_BHTW).transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up as one matrix product (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        self.gate_up = nn.Linear(spec.d_model, 2 * spec.d_ff, bias=False, device=device)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=False, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BTF) * up_BTF)


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        self.up = nn.Linear(spec.d_model, spec.d_ff, bias=False, device=device)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=False, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


FEED_FORWARDS = {"swiglu": SwiGLU, "gelu": GELU}


def rotary_tables(length: int, width: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """cos_TW and sin_TW of angle t · base^(-2i/W), both halves of a head alike; the first half's
    sine is negated.
    """
    device = device or torch.get_default_device()
    # On the host, since not every accelerator has float64.
    exponent = torch.arange(0, width, 2, device="cpu", dtype=torch.float64) / width
    angle = torch.arange(length, device="cpu", dtype=torch.float64)[:, None] * ROPE_BASE**-exponent
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).float().to(device), torch.cat((-sin, sin), -1).float().to(
        device
    )


def rotate(x_BHTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
    """Rotates the pairs (i, i + W/2). A roll swaps the halves and the table holds the sign: three
    kernels.
    """
    return torch.addcmul(x_BHTW * cos_TW, x_BHTW.roll(x_BHTW.shape[-1] // 2, -1), sin_TW)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that a linear layer gives here: autocast's where it is on, the tensor's own
    elsewhere.
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def compiled(model: TransformerLM, mode: str) -> nn.Module:
    """The model, compiled as one of COMPILE_MODES says. "blocks" compiles each block: quicker to
    compile.
    """
    if mode == "off":
        return model
    if mode == "blocks":
        for block in model.blocks:
            block.compile()
        return model
    modes = {"on": None, "reduce-overhead": mode, "max-autotune": "max-autotune-no-cudagraphs"}
    return cast(nn.Module, torch.compile(model, mode=modes[mode]))
