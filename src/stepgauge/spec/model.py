"""The shape of a Transformer and its parameter, FLOP and byte counts.

Letters in the formulas: B batch, T sequence, D model width, H attention heads, K key and value
heads, W width of a head, F feed-forward width, E experts, L layers, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from stepgauge.spec.fields import by_size
from stepgauge.spec.model_fields import (
    FEED_FORWARD_MATRICES,
    NORMS,
    NetworkFields,
)

FLOP_CONVENTION = (
    "model FLOPs: 2 per multiply-add of every matrix product; causal attention counts half, a "
    "window only its visible part; only the experts that a token is routed to; "
    "backward is twice forward; no recomputation, no norms, softmax or other elementwise work"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(NetworkFields):
    """A Transformer: embedding, blocks of attention and feed-forward layer, output matrix.

    The defaults describe a decoder with pre-norm blocks, no biases and as many key heads as query
    heads. Raises ValueError if the fields do not describe a valid network, for example if the heads
    do not divide the width.
    """

    @property
    def attention_matrix_parameters(self) -> int:
        """D(HW + 2KW) for queries, keys and values, plus HWD for the output."""
        return self.d_model * (sum(self.qkv_sections) + self.qkv_sections[0])

    @property
    def feed_forward_matrix_parameters(self) -> int:
        """2DF, or 3DF if gated; with experts, the count of one expert."""
        return FEED_FORWARD_MATRICES[self.feed_forward] * self.d_model * self.d_ff

    @property
    def block_matrix_parameters(self) -> int:
        """Matrix parameters of one block, with all experts and ED for their router."""
        return self._block_matrices(self.num_experts)

    @property
    def active_block_matrix_parameters(self) -> int:
        """Matrix parameters of one block that one token uses: its own experts only."""
        return self._block_matrices(self.experts_per_token)

    def _block_matrices(self, experts: int) -> int:
        router = self.num_experts * self.d_model
        feed_forward = max(1, experts) * self.feed_forward_matrix_parameters
        return self.attention_matrix_parameters + feed_forward + router

    @property
    def block_vector_parameters(self) -> int:
        """Bias and norm parameters of one block."""
        queries, keys, values = self.qkv_sections
        biases = 0 if self.attention_bias == "none" else queries + keys + values
        biases += self.d_model if self.attention_bias == "all" else 0
        if self.feed_forward_bias:
            matrices = FEED_FORWARD_MATRICES[self.feed_forward]
            biases += (matrices - 1) * self.d_ff + self.d_model
        features = 2 * self.d_model + (2 * self.head_width if self.qk_norm else 0)
        return biases + features * NORMS[self.norm].parameters

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, with a tied matrix counted once."""
        blocks = self.num_layers * (self.block_matrix_parameters + self.block_vector_parameters)
        return blocks + self._parameters_outside()

    def _parameters_outside(self) -> int:
        """Parameters of embeddings, final norm and head."""
        vectors = self.vocab_size
        if not self.tied_head:
            vectors += self.vocab_size
        if self.positions == "learned":
            vectors += self.num_positions or self.context_length
        if self.block != "post-norm":
            vectors += NORMS[self.norm].parameters
        return vectors * self.d_model

    def forward_flops(self, *, batch: int, sequence: int) -> int:
        """Model FLOPs of one forward pass (FLOP_CONVENTION).

        2BT(L(matrix parameters of a block) + VD) for the weights, plus 4BHW for each pair of query
        and key in each layer. There are T² pairs, under a causal mask T²/2, and Tw - w²/2 with a window
        of w tokens.
        """
        weights = self.num_layers * self.active_block_matrix_parameters
        weights += self.vocab_size * self.d_model
        if self.mask == "causal":
            windows = map(self.window_of, range(self.num_layers))
            pairs_twice = sum(_pairs_twice(sequence, window) for window in windows)
        else:
            pairs_twice = self.num_layers * 2 * sequence**2
        attention = 2 * batch * self.num_heads * self.head_width * pairs_twice
        return 2 * batch * sequence * weights + attention

    def step_flops(self, *, batch: int, sequence: int) -> int:
        """Model FLOPs of forward and backward: three times the forward's. Excludes the optimizer."""
        return 3 * self.forward_flops(batch=batch, sequence=sequence)

    def residual_stream_bytes(self, *, batch: int, sequence: int) -> int:
        """Bytes of one (B, T, D) tensor in fp32, which every block reads and writes."""
        return 4 * batch * sequence * self.d_model

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that define the computed function; two implementations have equal ones."""
        fields = dataclasses.asdict(self)
        del fields["attention"], fields["loss"]
        fields["norm"] = NORMS[self.norm].function
        return fields

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Self:
        """Returns a preset with some fields changed. Raises ValueError for an unknown name."""
        d_model, d_ff, num_layers, num_heads = by_size(size, SIZES)
        shape = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
        return cls(**{**shape, **changes})


def _pairs_twice(sequence: int, window: int) -> int:
    """Returns twice the number of causal (query, key) pairs; diagonal pairs count half."""
    visible = min(window or sequence, sequence)
    return 2 * sequence * visible - visible**2


# d_model, d_ff, layers, heads. The six from small to 10b are those of Stanford CS336, assignment 2,
# for which others have published results (EXPERIMENTS). The three below small are for machines
# without a GPU.
SIZES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {
        "nano": (64, 256, 2, 2),
        "tiny": (128, 512, 4, 4),
        "mini": (256, 1024, 6, 8),
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7b": (2560, 10240, 32, 32),
        "10b": (4608, 12288, 50, 36),
    }
)
