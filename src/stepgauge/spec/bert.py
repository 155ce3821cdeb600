"""The shape of a BERT network (Devlin et al. 2019) and its parameter, FLOP and byte counts.

Letters in the formulas: B batch, T sequence, P positions, D model width, F feed-forward width, L
layers, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from stepgauge.spec.fields import by_size, check, option
from stepgauge.spec.model_fields import nearest_divisor

NUM_TYPES = 2  # segment embeddings: first and second text of a pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertSpec:
    """A BERT encoder with the masked-language-model head, which shares the token embedding matrix.

    Raises ValueError if the fields do not describe a valid network.
    """

    vocab_size: int = option(30_522, "Vocabulary size", least=2, most=10_000_000, label="changed")
    context_length: int = option(
        512, "Sequence length in tokens", least=1, most=16_777_216, flag="context"
    )
    num_positions: int = option(
        512, "Number of learned positions", least=1, most=16_777_216, label="changed"
    )
    d_model: int = option(768, "Width of the residual stream", least=1, most=1_000_000, label=True)
    d_ff: int = option(
        3072, "Hidden width of the feed-forward layer", least=1, most=4_000_000, label=True
    )
    num_layers: int = option(12, "Number of blocks", least=1, most=10_000, label=True)
    num_heads: int = option(12, "Number of attention heads", least=1, most=100_000, label=True)
    # No command's option: ranks that share a sequence would drop different values.
    dropout: float = dataclasses.field(default=0.0, metadata={"least": 0.0, "most": 0.99})
    # Distinguishes it from a ModelSpec in a record.
    network: str = dataclasses.field(default="bert", init=False)

    def __post_init__(self) -> None:
        check(self)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; "
                f"the nearest divisor is {nearest_divisor(self.d_model, self.num_heads)}"
            )
        if self.context_length > self.num_positions:
            raise ValueError(
                f"context_length is {self.context_length}; it must be at most num_positions, "
                f"{self.num_positions}"
            )

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters, with the tied matrix counted once.

        Embeddings have (V + P + 2)D + 2D, each of L blocks 4D² + 2DF + 9D + F, and the head
        D² + 3D + V.
        """
        d, embeddings = self.d_model, self.vocab_size + self.num_positions + NUM_TYPES + 2
        block = 4 * d**2 + 2 * d * self.d_ff + 9 * d + self.d_ff
        return embeddings * d + self.num_layers * block + d**2 + 3 * d + self.vocab_size

    def forward_flops(self, *, batch: int, sequence: int) -> int:
        """Model FLOPs of one forward pass of encoder and head.

        2BT(L(4D² + 2DF) + D² + VD) for the weights, plus 4BT²D per layer for attention scores and
        values.
        """
        matrices = 4 * self.d_model**2 + 2 * self.d_model * self.d_ff
        weights = self.num_layers * matrices + self.d_model**2 + self.vocab_size * self.d_model
        attention = 4 * batch * sequence**2 * self.d_model * self.num_layers
        return 2 * batch * sequence * weights + attention

    def step_flops(self, *, batch: int, sequence: int) -> int:
        """Model FLOPs of forward and backward: three times the forward's."""
        return 3 * self.forward_flops(batch=batch, sequence=sequence)

    def residual_stream_bytes(self, *, batch: int, sequence: int) -> int:
        """Bytes of one (B, T, D) tensor in fp32, which every block reads and writes."""
        return 4 * batch * sequence * self.d_model

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Self:
        """Returns a preset with some fields changed. Raises ValueError for an unknown name."""
        num_layers, d_model = by_size(size, BERT_SIZES)
        # All published sizes have heads of width 64 and d_ff = 4 d_model.
        shape = {
            "d_model": d_model,
            "d_ff": 4 * d_model,
            "num_layers": num_layers,
            "num_heads": d_model // 64,
        }
        return cls(**{**shape, **changes})


# Layers and width: base and large from Devlin et al. 2019, the smaller ones from Turc et al. 2019.
BERT_SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "bert-tiny": (2, 128),
        "bert-mini": (4, 256),
        "bert-small": (4, 512),
        "bert-medium": (8, 512),
        "bert-base": (12, 768),
        "bert-large": (24, 1024),
    }
)
