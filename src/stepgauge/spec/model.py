"""The network as numbers: its shape, and the parameters, FLOPs and bytes that follow from the
shape.

Legend of the formulas: B batch, T sequence, D model width, F feed-forward width, L layers, V
vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from stepgauge.spec.fields import by_size, check, option

FEED_FORWARD_MATRICES: Mapping[str, int] = MappingProxyType({"swiglu": 3, "gelu": 2})

# Each norm by name, and the function that it implements.
NORMS: Mapping[str, str] = MappingProxyType(
    {
        "rmsnorm": "rmsnorm",
        "layernorm": "layernorm",
        "rmsnorm-eager": "rmsnorm",
        "triton": "rmsnorm",
    }
)
# Parameters per feature: a gain, and for LayerNorm a bias.
NORM_PARAMETERS: Mapping[str, int] = MappingProxyType({"rmsnorm": 1, "layernorm": 2})

POSITIONS = ("rope", "learned")
ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "eager", "triton")
LOSSES = ("cross-entropy", "fused")

FLOP_CONVENTION = (
    "model FLOPs: 2 per multiply-add of every matrix product; causal attention counted half; "
    "backward twice forward; no recomputation, no norms, softmax or other elementwise work"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only Transformer: pre-norm blocks, no biases in the linear layers.

    Raises ValueError where the fields do not describe a network (heads that do not divide the
    width, say).
    """

    vocab_size: int = option(
        10_000,
        "tokens in the vocabulary",
        least=2,
        most=10_000_000,
        word="vocabulary {vocab_size:,}",
        quiet=10_000,
    )
    context_length: int = option(
        512, "longest sequence, in tokens", least=1, most=16_777_216, flag="context"
    )
    d_model: int = option(
        768, "width of the residual stream", least=1, most=1_000_000, word="width {d_model}"
    )
    d_ff: int = option(
        3072, "width of the feed-forward layer", least=1, most=4_000_000, word="feed-forward {d_ff}"
    )
    num_layers: int = option(12, "blocks", least=1, most=10_000, word="{num_layers} blocks")
    num_heads: int = option(12, "attention heads", least=1, most=100_000, word="{num_heads} heads")
    feed_forward: str = option(
        "swiglu",
        "SwiGLU (three matrices) or GELU (two)",
        choices=FEED_FORWARD_MATRICES,
        word="{feed_forward}",
        quiet="swiglu",
    )
    norm: str = option(
        "rmsnorm",
        "normalisation, and which implementation of it",
        choices=NORMS,
        word="norm {norm}",
        quiet="rmsnorm",
    )
    positions: str = option(
        "rope",
        "rotary or learned positions",
        choices=POSITIONS,
        word="{positions} positions",
        quiet="rope",
    )
    tied_head: bool = option(
        False, "use the embedding as the output matrix", bare=True, word="tied head", quiet=False
    )
    attention: str = option(
        "sdpa",
        "implementation of attention",
        choices=ATTENTIONS,
        word="attention {attention}",
        quiet="sdpa",
    )
    loss: str = option(
        "cross-entropy",
        "implementation of output layer and loss",
        choices=LOSSES,
        word="loss {loss}",
        quiet="cross-entropy",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; "
                f"the nearest that does is {nearest_divisor(self.d_model, self.num_heads)}"
            )
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(
                f"d_model {self.d_model} over num_heads {self.num_heads} gives heads of odd width "
                f"{self.head_width}; rotary positions need an even one"
            )

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def block_matrix_parameters(self) -> int:
        """Weights of one block's matrix products: 4D² of attention and 2DF or 3DF of feed-forward."""
        feed_forward = FEED_FORWARD_MATRICES[self.feed_forward] * self.d_model * self.d_ff
        return 4 * self.d_model**2 + feed_forward

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, a tied matrix counted once."""
        embedding = self.vocab_size * self.d_model
        head = 0 if self.tied_head else embedding
        positions = self.context_length * self.d_model if self.positions == "learned" else 0
        norms = (2 * self.num_layers + 1) * NORM_PARAMETERS[NORMS[self.norm]] * self.d_model
        return embedding + head + positions + norms + self.num_layers * self.block_matrix_parameters

    def forward_flops(self, *, batch: int, sequence: int, causal_half: bool = True) -> int:
        """Model FLOPs of one forward pass (FLOP_CONVENTION).

        2BT(L(4D² + 2DF or 3DF) + VD) for the weights, and 4BT²D a layer for scores and values,
        halved when `causal_half`, since half of the score matrix is masked.
        """
        tokens = batch * sequence
        weights = self.num_layers * self.block_matrix_parameters + self.vocab_size * self.d_model
        attention = 4 * tokens * sequence * self.d_model * self.num_layers
        return 2 * tokens * weights + (attention // 2 if causal_half else attention)

    def step_flops(self, *, batch: int, sequence: int) -> int:
        """Model FLOPs of forward and backward: three times the forward's. The optimizer is not
        counted.
        """
        return 3 * self.forward_flops(batch=batch, sequence=sequence)

    def residual_stream_bytes(self, *, batch: int, sequence: int, bytes_per_value: int = 4) -> int:
        """Bytes of one (B, T, D) tensor, what every block reads and writes."""
        return batch * sequence * self.d_model * bytes_per_value

    def architecture(self) -> dict[str, Any]:
        """The fields that decide which function is computed: equal for two implementations of one
        network.
        """
        fields = dataclasses.asdict(self)
        del fields["attention"], fields["loss"]
        fields["norm"] = NORMS[self.norm]
        return fields

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        return tuple(SIZES)

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Self:
        """The preset of that name with fields changed. Raises ValueError for an unknown name."""
        d_model, d_ff, num_layers, num_heads = by_size(size, SIZES)
        shape = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
        return cls(**{**shape, **changes})


# d_model, d_ff, layers, heads. The six from small to 10b are the course's whose figures others
# published (EXPERIMENTS: Stanford CS336, assignment 2); the three below small are ours, for
# machines without a GPU.
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


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`."""
    divisors = (
        d
        for low in range(1, int(number**0.5) + 1)
        if number % low == 0
        for d in (low, number // low)
    )
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))
