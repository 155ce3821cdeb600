"""A Transformer language model, built from a ModelSpec and the parts that it names.

Legend: B batch, T sequence, D model width, H heads, K key heads, W head width, R rotated features of
a head, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from stepgauge.kernels.rotary import rotate, rotated_heads
from stepgauge.models.checkpointing import Through, checkpointed, in_order
from stepgauge.models.drawing import draw_normal
from stepgauge.models.feed_forward import build_feed_forward
from stepgauge.models.fused_linear import FusedLinear
from stepgauge.models.parts import ATTENTIONS, LOSSES, NORMS, WINDOWED
from stepgauge.models.rotary import rotary_tables
from stepgauge.ranges import ranged
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.stages import HALVES, halves_of, num_parts
from stepgauge.spec.rope import RUNNABLE, RopeScaling

Rotation = tuple[Tensor, Tensor] | None


class TransformerLM(nn.Module):
    """`forward(tokens_BT)` returns logits_BTV, and `forward(tokens_BT, targets_BT)` the mean loss. The
    tokens have positions 0 to T-1, or positions_T.

    parts  the parts of the network to build, as numbered in spec.plan.stages; None: all. A stage with
           the embeddings takes tokens_BT, other stages hidden_BTD. A stage with the head returns
           logits or loss, other stages hidden_BTD. Parameters have the same names and values as in
           the whole network.
    seed   seed of the weights; None: that of the last torch.manual_seed

    Raises ValueError for a network that cannot be run yet.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | None = None,
        parts: range | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        require_runnable(spec)
        self.spec = spec
        self.compute_loss = LOSSES[spec.loss]
        self.through_blocks: Through = in_order  # replaced for checkpointing
        parts = parts or range(num_parts(spec.num_layers))
        is_first, is_last = 0 in parts, num_parts(spec.num_layers) - 1 in parts
        self.embedding: nn.Embedding | None = None
        self.positions: nn.Embedding | None = None
        self.head: nn.Linear | None = None
        if is_first:
            self.embedding = nn.Embedding(spec.vocab_size, spec.d_model, device=device)
        if is_first and spec.positions == "learned":
            length = spec.num_positions or spec.context_length
            self.positions = nn.Embedding(length, spec.d_model, device=device)
        self.blocks = nn.ModuleList()
        for layer, halves in halves_of(parts, spec.num_layers).items():
            self.blocks.add_module(str(layer), Block(spec, layer, device, halves))
        has_norm = is_last and spec.block != "post-norm"
        self.norm = _norm(spec, spec.d_model, device) if has_norm else nn.Identity()
        if is_last:
            self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False, device=device)
        if self.head is not None and self.embedding is not None and spec.tied_head:
            self.head.weight = self.embedding.weight
        if spec.positions == "rope":
            cos_TR, sin_TR = rotary_tables(spec, device)
            self.cos_TR: Tensor
            self.sin_TR: Tensor
            self.register_buffer("cos_TR", cos_TR, persistent=False)
            self.register_buffer("sin_TR", sin_TR, persistent=False)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws normal weights with standard deviation 0.02, divided by sqrt(2L) for weights that
        write to the residual stream (GPT-2). Sets biases to zero.
        """
        residual_std = 0.02 / math.sqrt(2 * self.spec.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                is_tied = name == "head.weight" and self.spec.tied_head
                is_residual = name.endswith(("output.weight", "down.weight", "down_weight"))
                draw_normal(
                    parameter,
                    "embedding.weight" if is_tied else name,
                    seed=seed,
                    std=residual_std if is_residual else 0.02,
                )
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(
        self, inputs: Tensor, targets_BT: Tensor | None = None, positions_T: Tensor | None = None
    ) -> Tensor:
        positions = slice(inputs.shape[1]) if positions_T is None else positions_T
        x_BTD = inputs if self.embedding is None else self._embed(self.embedding, inputs, positions)
        rotation = None
        if self.spec.positions == "rope":
            # All positions, because a stage's input may be a shard of the sequence that its
            # attention gathers.
            rotated = slice(None) if positions_T is None else positions_T
            dtype = compute_dtype(x_BTD)
            rotation = (self.cos_TR[rotated].to(dtype), self.sin_TR[rotated].to(dtype))
        x_BTD = self.norm(self.through_blocks(self.blocks, x_BTD, rotation))
        if targets_BT is None:
            return x_BTD if self.head is None else self.head(x_BTD)
        if self.head is None:
            raise ValueError("targets were given to a stage without the head; it has no loss")
        return self.compute_loss(x_BTD, self.head.weight, targets_BT)

    def _embed(
        self, embedding: nn.Embedding, tokens_BT: Tensor, positions: slice | Tensor
    ) -> Tensor:
        x_BTD = embedding(tokens_BT)
        if self.spec.scaled_embedding:
            x_BTD = x_BTD * math.sqrt(self.spec.d_model)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[positions]
        return x_BTD


class Block(nn.Module):
    """Attention and feed-forward layer on the residual stream. spec.block places the norms.

    halves  the halves that it has (HALVES)

    Raises ValueError for half of a parallel block.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        device: torch.device | None,
        halves: Sequence[str] = HALVES,
    ):
        super().__init__()
        if spec.block == "parallel" and len(halves) < len(HALVES):
            raise ValueError("block is 'parallel', which is not cut in two; choose 'pre-norm'")
        self.order = spec.block
        self.attention: Attention | None = None
        self.feed_forward: nn.Module | None = None
        if "attention" in halves:
            self.attention_norm = _norm(spec, spec.d_model, device)
            self.attention = Attention(spec, layer, device)
        if "feed_forward" in halves:
            self.feed_forward_norm = _norm(spec, spec.d_model, device)
            self.feed_forward = build_feed_forward(spec, device)

    def forward(self, x_BTD: Tensor, rotation: Rotation, checkpointing: str = "none") -> Tensor:
        if checkpointing == "none":
            return self._compute(x_BTD, rotation)
        return checkpointed(checkpointing, self._compute, x_BTD, rotation)

    def _compute(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        block_input_BTD = x_BTD
        if self.attention is not None and self.order == "post-norm":
            x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, rotation))
        elif self.attention is not None:
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        if self.feed_forward is None:
            return x_BTD
        if self.order == "post-norm":
            return self.feed_forward_norm(x_BTD + self.feed_forward(x_BTD))
        inputs_BTD = block_input_BTD if self.order == "parallel" else x_BTD
        return x_BTD + self.feed_forward(self.feed_forward_norm(inputs_BTD))


class Attention(nn.Module):
    """Multi-head attention with query, key and value projections in one matrix product."""

    def __init__(self, spec: ModelSpec, layer: int, device: torch.device | None):
        super().__init__()
        self.head_width = spec.head_width
        window = spec.window_of(layer)
        settings = {"window": window} if window else {}
        self.is_causal = spec.mask == "causal"
        self.attend = functools.partial(
            ATTENTIONS[spec.attention], is_causal=self.is_causal, **settings
        )
        bias, sections = spec.attention_bias, spec.qkv_sections
        self.input = FusedLinear(spec.d_model, sections, bias=bias != "none", device=device)
        self.output = nn.Linear(sections[0], spec.d_model, bias=bias == "all", device=device)
        self.qk_norms: nn.ModuleList | None = None
        if spec.qk_norm:
            self.qk_norms = nn.ModuleList(_norm(spec, spec.head_width, device) for _ in range(2))

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        heads_BTHW = self.input(x_BTD).unflatten(-1, (-1, self.head_width))
        sizes = [n // self.head_width for n in self.input.sections]
        if self.qk_norms is None and rotation is not None and torch.compiler.is_compiling():
            tables_TR = [table_TR[: heads_BTHW.shape[1]] for table_TR in rotation]
            q_BTHW, k_BTKW, v_BTKW = rotated_heads(heads_BTHW, sizes, *tables_TR)
        elif self.qk_norms is None:
            # Query and key heads are rotated as one tensor, which halves the launches.
            qk_BTHW, v_BTKW = heads_BTHW.split((sum(sizes[:2]), sizes[2]), dim=2)
            q_BTHW, k_BTKW = _rotated(qk_BTHW, rotation).split(sizes[:2], dim=2)
        else:
            q_BTHW, k_BTKW, v_BTKW = heads_BTHW.split(sizes, dim=2)
            q_BTHW, k_BTKW = self.qk_norms[0](q_BTHW), self.qk_norms[1](k_BTKW)
            q_BTHW, k_BTKW = _rotated(q_BTHW, rotation), _rotated(k_BTKW, rotation)
        o_BHTW = self.attend(*(x.transpose(1, 2) for x in (q_BTHW, k_BTKW, v_BTKW)))
        return self.output(o_BHTW.transpose(1, 2).flatten(-2))


def _rotated(x_BTHW: Tensor, rotation: Rotation) -> Tensor:
    if rotation is None:
        return x_BTHW
    with ranged("rotation"):
        return rotate(x_BTHW, *(table_TR[: x_BTHW.shape[1], None] for table_TR in rotation))


def _norm(spec: ModelSpec, width: int, device: torch.device | None) -> nn.Module:
    return NORMS[spec.norm](width, eps=spec.norm_epsilon, device=device)


def require_runnable(spec: ModelSpec) -> None:
    """Raises ValueError for a spec whose formulas exist, but which no module here implements."""
    scaling = RopeScaling.parse(spec.rope_scaling)
    if spec.positions == "rope" and scaling.kind not in RUNNABLE:
        raise ValueError(
            f"rope_scaling is {spec.rope_scaling!r}, which cannot be run yet; "
            f"choose one of {', '.join(RUNNABLE)}"
        )
    windows = {spec.window_of(layer) for layer in range(spec.num_layers)}
    if any(windows) and spec.attention not in WINDOWED:
        raise ValueError(
            f"window is {spec.window}, which attention {spec.attention} does not have; "
            f"choose {' or '.join(WINDOWED)}, or a context of at most {spec.window}"
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a linear layer's output: autocast's if it is on, or else that of x."""
    device = x.device.type
    casts = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype


def compiled(model: TransformerLM, mode: str) -> nn.Module:
    """Compiles the model with one of COMPILE_MODES. "blocks" takes less time to compile."""
    if mode == "off":
        return model
    if mode == "blocks":
        for block in model.blocks:
            block.compile()
        return model
    modes = {"on": None, "reduce-overhead": mode, "max-autotune": "max-autotune-no-cudagraphs"}
    return cast(nn.Module, torch.compile(model, mode=modes[mode]))
