"""What can be said about a network: the fields of a ModelSpec, and which of them fit together.

A record from before there was a field is read with the field's default, so each default means what
was done before.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from stepgauge.spec.fields import check, option
from stepgauge.spec.rope import RopeScaling

# Matrices of each feed-forward layer: with three, the activation of one product gates another.
# The tanh kinds approximate GELU as GPT-2 and Gemma do.
FEED_FORWARD_MATRICES: Mapping[str, int] = MappingProxyType(
    {
        "swiglu": 3,
        "geglu": 3,
        "geglu-tanh": 3,
        "reglu": 3,
        "gelu": 2,
        "gelu-tanh": 2,
        "relu": 2,
        "silu": 2,
    }
)

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

# Where a block's norms stand: before attention and feed-forward; after each sum (Vaswani et al.
# 2017), with none at the end; before both, which then read the same input (GPT-NeoX).
BLOCKS = ("pre-norm", "post-norm", "parallel")
BIASES = ("none", "qkv", "all")
MASKS = ("causal", "full")
POSITIONS = ("rope", "learned", "none")
ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "eager", "triton")
LOSSES = ("cross-entropy", "fused")
GATES = ("torch", "quack")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkFields:
    """The fields of a ModelSpec, in groups, and what they stand for where they say "as usual"."""

    # Shape
    vocab_size: int = option(
        10_000, "tokens in the vocabulary", least=2, most=10_000_000, label="changed"
    )
    context_length: int = option(
        512, "longest sequence, in tokens", least=1, most=16_777_216, flag="context"
    )
    d_model: int = option(768, "width of the residual stream", least=1, most=1_000_000, label=True)
    d_ff: int = option(3072, "width of the feed-forward layer", least=1, most=4_000_000, label=True)
    num_layers: int = option(12, "blocks", least=1, most=10_000, label=True)

    # Attention
    num_heads: int = option(12, "attention heads", least=1, most=100_000, label=True)
    num_kv_heads: int = option(
        0,
        "heads of keys and values; 0: as many as attention heads",
        least=0,
        most=100_000,
        label="changed",
    )
    head_dim: int = option(
        0, "width of a head; 0: d_model over num_heads", least=0, most=100_000, label="changed"
    )
    qk_norm: bool = option(
        False, "a norm of each query and key head", flag_value=True, label="changed"
    )
    attention_bias: str = option(
        "none",
        "biases in attention: of queries, keys and values, or of the output too",
        choices=BIASES,
        label="changed",
    )
    mask: str = option(
        "causal",
        "what a token sees: those before it, or the whole sequence",
        choices=MASKS,
        label="changed",
    )
    window: int = option(
        0,
        "last tokens that a token sees, itself among them; 0: all",
        least=0,
        most=16_777_216,
        label="changed",
    )
    full_attention_every: int = option(
        0,
        "of a network with a window: every n-th block has none; 0: all have it",
        least=0,
        most=10_000,
        label="changed",
    )

    # Feed-forward
    feed_forward: str = option(
        "swiglu",
        "feed-forward layer; those with glu have three matrices, others two",
        choices=FEED_FORWARD_MATRICES,
        label="changed",
    )
    feed_forward_bias: bool = option(
        False, "biases in the feed-forward layer", flag_value=True, label="changed"
    )
    num_experts: int = option(
        0,
        "feed-forward layers a block, of which each token goes to some; 0: one, for all",
        least=0,
        most=10_000,
        label="changed",
        named_with="experts_per_token",
    )
    experts_per_token: int = option(0, "experts that a token goes to", least=0, most=10_000)

    # Norms
    norm: str = option(
        "rmsnorm", "normalisation, and which implementation of it", choices=NORMS, label="changed"
    )
    norm_epsilon: float = option(
        1e-5, "added to the mean square", least=0.0, most=1.0, label="changed"
    )
    block: str = option(
        "pre-norm",
        "where norms stand; parallel: attention and feed-forward read the same input",
        choices=BLOCKS,
        label="changed",
    )

    # Positions
    positions: str = option(
        "rope", "rotary or learned positions", choices=POSITIONS, label="changed"
    )
    num_positions: int = option(
        0, "learned positions; 0: as many as the context", least=0, most=16_777_216, label="changed"
    )
    rope_base: float = option(
        10_000.0, "base of the rotary angles", least=1.0, most=1e12, label="changed"
    )
    rope_fraction: float = option(
        1.0, "part of a head that is rotated", least=0.0, most=1.0, label="changed"
    )
    rope_scaling: str = option(
        "none",
        "how angles are stretched to a longer context: linear:FACTOR, "
        "llama3:FACTOR:LOW:HIGH:CONTEXT",
        label="changed",
    )

    # Ends
    tied_head: bool = option(
        False, "use the embedding as the output matrix", flag_value=True, label="changed"
    )
    scaled_embedding: bool = option(
        False, "embedding times sqrt(d_model), as Gemma", flag_value=True, label="changed"
    )

    # Implementations
    attention: str = option(
        "sdpa", "implementation of attention", choices=ATTENTIONS, label="changed"
    )
    loss: str = option(
        "cross-entropy", "implementation of output layer and loss", choices=LOSSES, label="changed"
    )
    gate: str = option(
        "torch",
        "implementation of SwiGLU's gate: quack has it in the products before and after it, on Hopper",
        choices=GATES,
        label="changed",
    )

    def __post_init__(self) -> None:
        check(self)
        RopeScaling.parse(self.rope_scaling)
        _check_gate(self)
        for mistake in _mistakes(self):
            raise ValueError(mistake)

    def require_defaults(self, beside: str, why: str) -> None:
        """Raises ValueError, which ends with `why`, for a field that is not at its default and is
        neither of the shape nor in the list `beside`.
        """
        shape = "vocab_size context_length d_model d_ff num_layers num_heads num_positions"
        free = {*shape.split(), *beside.split()}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in free and value != field.default:
                raise ValueError(f"{field.name} is {value!r}, which {why}")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def rotary_width(self) -> int:
        """Of each head, the features that are rotated."""
        return int(self.head_width * self.rope_fraction)

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Rows of the fused matrix that are queries, keys and values."""
        keys = self.kv_heads * self.head_width
        return self.num_heads * self.head_width, keys, keys

    @property
    def is_gated(self) -> bool:
        return FEED_FORWARD_MATRICES[self.feed_forward] == 3

    def window_of(self, layer: int) -> int:
        """Tokens that a token of that block sees, counted with itself; 0 where it is all."""
        every = self.full_attention_every
        is_full = every > 0 and (layer + 1) % every == 0
        return 0 if is_full or self.window >= self.context_length else self.window


def _mistakes(spec: NetworkFields) -> Iterator[str]:
    """A sentence for each way in which the fields contradict each other."""
    if not spec.head_dim and spec.d_model % spec.num_heads:
        yield (
            f"num_heads is {spec.num_heads}, which does not divide d_model {spec.d_model}; "
            f"the nearest that does is {nearest_divisor(spec.d_model, spec.num_heads)}"
        )
    if spec.num_heads % spec.kv_heads:
        yield (
            f"num_kv_heads is {spec.num_kv_heads}, which does not divide num_heads "
            f"{spec.num_heads}; the nearest that does is "
            f"{nearest_divisor(spec.num_heads, spec.num_kv_heads)}"
        )
    if spec.positions == "rope" and spec.rotary_width % 2:
        yield (
            f"d_model {spec.d_model} over num_heads {spec.num_heads} gives heads of odd width "
            f"{spec.head_width}; rotary positions need an even one"
            if spec.rope_fraction == 1.0 and not spec.head_dim
            else f"rope_fraction {spec.rope_fraction:g} of heads of {spec.head_width} rotates "
            f"{spec.rotary_width} features; choose one that gives an even number"
        )
    if spec.positions == "learned" and 0 < spec.num_positions < spec.context_length:
        yield (
            f"context_length is {spec.context_length}; the network has {spec.num_positions} "
            "positions"
        )
    if spec.window and spec.mask == "full":
        yield f"window is {spec.window}, which needs the causal mask; leave it out"
    if spec.experts_per_token > spec.num_experts:
        yield (
            f"experts_per_token is {spec.experts_per_token} of num_experts {spec.num_experts}; "
            "choose at most all of them"
        )
    if spec.num_experts and not spec.experts_per_token:
        yield f"num_experts is {spec.num_experts}; give experts_per_token too"
    if spec.num_experts and spec.feed_forward_bias:
        yield "feed_forward_bias is True; experts have no biases: leave it out"


def _check_gate(spec: NetworkFields) -> None:
    """Raises ValueError for a feed-forward layer that has no gate but torch's."""
    has_another = spec.num_experts or spec.feed_forward_bias or spec.feed_forward != "swiglu"
    if spec.gate != "torch" and has_another:
        raise ValueError(
            f"gate is {spec.gate!r}, which is for swiglu without experts and biases: leave it out"
        )


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`; the smaller of two."""
    return min(divisors(number), key=lambda divisor: abs(divisor - wanted))
