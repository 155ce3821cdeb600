"""BERT (Devlin et al. 2019): a bidirectional encoder with the masked-language-model loss.

All sequences have the full length: there is no padding, and no mask for it.

Legend: B batch, T sequence, D model width, H heads, W head width, F feed-forward width, V
vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.models.checkpointing import Through, checkpointed, in_order
from stepgauge.models.drawing import draw_normal
from stepgauge.models.fused_linear import FusedLinear
from stepgauge.spec.bert import NUM_TYPES, BertSpec
from stepgauge.spec.plan.stages import HALVES, halves_of, num_parts

NORM_EPSILON = 1e-12
NOT_MASKED = -100  # target of a token that does not count in the loss


class BertForMaskedLM(nn.Module):
    """`forward(tokens_BT, None, types_BT)` returns logits_BTV, and `forward(tokens_BT, targets_BT,
    types_BT)` the mean loss over the masked tokens. Without types_BT all tokens have the first type.
    The output matrix is the token embedding.

    parts  the parts of the network to build, as numbered in spec.plan.stages; None: all. A stage
           without the embeddings takes hidden_BTD, and one without the head returns it. Parameters
           have the same names and values as in the whole network.
    seed   seed of the weights; None: that of the last torch.manual_seed
    """

    def __init__(
        self,
        spec: BertSpec,
        *,
        device: torch.device | None = None,
        parts: range | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.through_blocks: Through = in_order  # replaced for checkpointing
        parts = parts or range(num_parts(spec.num_layers))
        self.is_first, self.is_last = 0 in parts, num_parts(spec.num_layers) - 1 in parts
        if self.is_first:
            self.tokens = nn.Embedding(spec.vocab_size, spec.d_model, device=device)
            self.positions = nn.Embedding(spec.num_positions, spec.d_model, device=device)
            self.types = nn.Embedding(NUM_TYPES, spec.d_model, device=device)
            self.norm = _norm(spec, device)
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList()
        for layer, halves in halves_of(parts, spec.num_layers).items():
            self.blocks.add_module(str(layer), Block(spec, device, halves))
        if self.is_last:
            self.compute_loss = masked_cross_entropy
            self.transform = nn.Linear(spec.d_model, spec.d_model, device=device)
            self.transform_norm = _norm(spec, device)
            self.head = nn.Linear(spec.d_model, spec.vocab_size, device=device)
        if self.is_first and self.is_last:
            self.head.weight = self.tokens.weight
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws normal weights with standard deviation 0.02, and sets biases to zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                drawn_as = "tokens.weight" if name == "head.weight" else name  # the head is tied
                draw_normal(parameter, drawn_as, seed=seed, std=0.02)
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(
        self, inputs: Tensor, targets_BT: Tensor | None = None, types_BT: Tensor | None = None
    ) -> Tensor:
        x_BTD = self._embed(inputs, types_BT) if self.is_first else inputs
        x_BTD = self.through_blocks(self.blocks, x_BTD, None)
        if not self.is_last:
            if targets_BT is not None:
                raise ValueError("targets were given to a stage without the head; it has no loss")
            return x_BTD
        x_BTD = self.transform_norm(F.gelu(self.transform(x_BTD)))
        if targets_BT is None:
            return self.head(x_BTD)
        return self.compute_loss(x_BTD, self.head.weight, targets_BT, self.head.bias)

    def _embed(self, tokens_BT: Tensor, types_BT: Tensor | None) -> Tensor:
        types_BT = torch.zeros_like(tokens_BT) if types_BT is None else types_BT
        positions_TD = self.positions.weight[: tokens_BT.shape[1]]
        x_BTD = self.tokens(tokens_BT) + self.types(types_BT) + positions_TD
        return self.dropout(self.norm(x_BTD))


def masked_cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor
) -> Tensor:
    """Output layer and mean loss over the masked tokens."""
    logits_BTV = F.linear(hidden_BTD, weight_VD, bias_V)
    targets_N = targets_BT.flatten()
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_N, ignore_index=NOT_MASKED)


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)): a post-norm block.

    halves  the halves that it has (HALVES)
    """

    def __init__(self, spec: BertSpec, device: torch.device | None, halves: Sequence[str] = HALVES):
        super().__init__()
        self.attention: Attention | None = None
        self.feed_forward: FeedForward | None = None
        if "attention" in halves:
            self.attention = Attention(spec, device)
            self.attention_norm = _norm(spec, device)
        if "feed_forward" in halves:
            self.feed_forward = FeedForward(spec, device)
            self.feed_forward_norm = _norm(spec, device)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTD: Tensor, _: None = None, checkpointing: str = "none") -> Tensor:
        if checkpointing == "none":
            return self._compute(x_BTD)
        return checkpointed(checkpointing, self._compute, x_BTD)

    def _compute(self, x_BTD: Tensor) -> Tensor:
        if self.attention is not None:
            x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD)))
        if self.feed_forward is not None:
            x_BTD = self.feed_forward_norm(x_BTD + self.dropout(self.feed_forward(x_BTD)))
        return x_BTD


class Attention(nn.Module):
    """Multi-head attention over the whole sequence, with its three projections in one product."""

    def __init__(self, spec: BertSpec, device: torch.device | None):
        super().__init__()
        self.head_width = spec.head_width
        self.dropout = spec.dropout
        sections = (spec.d_model,) * 3
        self.input = FusedLinear(spec.d_model, sections, bias=True, device=device)
        self.output = nn.Linear(spec.d_model, spec.d_model, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads_BHTW = self.input(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q_BHTW, k_BHTW, v_BHTW = heads_BHTW.chunk(3, dim=1)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTW = F.scaled_dot_product_attention(q_BHTW, k_BHTW, v_BHTW, dropout_p=dropout)
        return self.output(mixed_BHTW.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """down(gelu(up(x))) with the exact GELU."""

    def __init__(self, spec: BertSpec, device: torch.device | None):
        super().__init__()
        self.up = nn.Linear(spec.d_model, spec.d_ff, device=device)
        self.down = nn.Linear(spec.d_ff, spec.d_model, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


def _norm(spec: BertSpec, device: torch.device | None) -> nn.LayerNorm:
    return nn.LayerNorm(spec.d_model, eps=NORM_EPSILON, device=device)
