"""The fields of a ModelSpec, and the checks that they do not contradict each other.

Older records that lack a field are read with its default. The default must therefore mean what was
done before the field existed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from stepgauge.spec.fields import check, option
from stepgauge.spec.rope import RopeScaling

# Matrices of each feed-forward layer. The gated ones have three: the activation of one product gates
# another. The tanh variants approximate GELU as GPT-2 and Gemma do.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """What is known of a norm without its module, which is in models/parts.py.

    function    the function that it computes; implementations of one function name the same
    parameters  per feature: a gain, and a bias for LayerNorm
    torch_tp    torch's tensor parallel supports it
    """

    function: str
    parameters: int
    torch_tp: bool


NORMS: Mapping[str, Norm] = MappingProxyType(
    {
        "rmsnorm": Norm(function="rmsnorm", parameters=1, torch_tp=True),
        "layernorm": Norm(function="layernorm", parameters=2, torch_tp=True),
        "rmsnorm-eager": Norm(function="rmsnorm", parameters=1, torch_tp=True),
        "triton": Norm(function="rmsnorm", parameters=1, torch_tp=False),
    }
)

# Position of the norms in a block. pre-norm: before attention and before feed-forward. post-norm:
# after each residual sum, with no final norm (Vaswani et al. 2017). parallel: before attention and
# feed-forward, which both read the block's input (GPT-NeoX).
BLOCKS = ("pre-norm", "post-norm", "parallel")
BIASES = ("none", "qkv", "all")
MASKS = ("causal", "full")
POSITIONS = ("rope", "learned", "none")
ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "eager", "triton")
LOSSES = ("cross-entropy", "fused")
GATES = ("torch", "quack")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkFields:
    """The fields of a ModelSpec in groups, and the values that they imply."""

    # Shape
    vocab_size: int = option(10_000, "Vocabulary size", least=2, most=10_000_000, label="changed")
    context_length: int = option(
        512, "Sequence length in tokens", least=1, most=16_777_216, flag="context"
    )
    d_model: int = option(768, "Width of the residual stream", least=1, most=1_000_000, label=True)
    d_ff: int = option(
        3072, "Hidden width of the feed-forward layer", least=1, most=4_000_000, label=True
    )
    num_layers: int = option(12, "Number of blocks", least=1, most=10_000, label=True)

    # Attention
    num_heads: int = option(12, "Number of attention heads", least=1, most=100_000, label=True)
    num_kv_heads: int = option(
        0,
        "Number of key and value heads; 0: as many as attention heads",
        least=0,
        most=100_000,
        label="changed",
    )
    head_dim: int = option(
        0, "Width of a head; 0: d_model / num_heads", least=0, most=100_000, label="changed"
    )
    qk_norm: bool = option(
        False, "Normalise each query and key head", flag_value=True, label="changed"
    )
    attention_bias: str = option(
        "none",
        "Biases in attention; qkv: queries, keys and values, all: also the output",
        choices=BIASES,
        label="changed",
    )
    mask: str = option(
        "causal",
        "Attention mask; causal: a token sees only itself and earlier tokens",
        choices=MASKS,
        label="changed",
    )
    window: int = option(
        0,
        "Attention window: how many of the last tokens a token sees, including itself; 0: no limit",
        least=0,
        most=16_777_216,
        label="changed",
    )
    full_attention_every: int = option(
        0,
        "With a window: every n-th block has full attention; 0: none",
        least=0,
        most=10_000,
        label="changed",
    )

    # Feed-forward
    feed_forward: str = option(
        "swiglu",
        "Feed-forward layer; the gated ones (glu) have three matrices, the others two",
        choices=FEED_FORWARD_MATRICES,
        label="changed",
    )
    feed_forward_bias: bool = option(
        False, "Biases in the feed-forward layer", flag_value=True, label="changed"
    )
    num_experts: int = option(
        0,
        "Experts per block (mixture of experts); 0: one feed-forward layer for all tokens",
        least=0,
        most=10_000,
        label="changed",
        named_with="experts_per_token",
    )
    experts_per_token: int = option(0, "Experts that each token is routed to", least=0, most=10_000)

    # Norms
    norm: str = option(
        "rmsnorm",
        "Norm; rmsnorm-eager and triton are other implementations of rmsnorm",
        choices=NORMS,
        label="changed",
    )
    norm_epsilon: float = option(1e-5, "Epsilon of the norms", least=0.0, most=1.0, label="changed")
    block: str = option(
        "pre-norm",
        "Position of the norms; parallel: attention and feed-forward read the same input",
        choices=BLOCKS,
        label="changed",
    )

    # Positions
    positions: str = option("rope", "Position encoding", choices=POSITIONS, label="changed")
    num_positions: int = option(
        0,
        "Number of learned positions; 0: the context length",
        least=0,
        most=16_777_216,
        label="changed",
    )
    rope_base: float = option(
        10_000.0, "Base of the rotary angles", least=1.0, most=1e12, label="changed"
    )
    rope_fraction: float = option(
        1.0, "Fraction of each head that is rotated", least=0.0, most=1.0, label="changed"
    )
    rope_scaling: str = option(
        "none",
        "Scaling of the rotary angles to a longer context: linear:FACTOR or "
        "llama3:FACTOR:LOW:HIGH:CONTEXT",
        label="changed",
    )

    # Ends
    tied_head: bool = option(
        False, "Use the embedding as the output matrix", flag_value=True, label="changed"
    )
    scaled_embedding: bool = option(
        False,
        "Multiply the embedding by sqrt(d_model), as Gemma does",
        flag_value=True,
        label="changed",
    )

    # Implementations
    attention: str = option(
        "sdpa", "Implementation of attention", choices=ATTENTIONS, label="changed"
    )
    loss: str = option(
        "cross-entropy",
        "Implementation of the output layer and loss",
        choices=LOSSES,
        label="changed",
    )
    gate: str = option(
        "torch",
        "Implementation of SwiGLU; quack fuses the gate into the matrix products (Hopper only)",
        choices=GATES,
        label="changed",
    )

    def __post_init__(self) -> None:
        check(self)
        RopeScaling.parse(self.rope_scaling)
        if contradiction := next(_contradictions(self), ""):
            raise ValueError(contradiction)

    def require_defaults(self, free: str, why: str) -> None:
        """Raises ValueError if a field is neither at its default, nor free to change.

        free  names of fields that may have any value, in addition to those of the shape
        why   end of the message, after "FIELD is VALUE, which "
        """
        shape = "vocab_size context_length d_model d_ff num_layers num_heads num_positions"
        any_value = {*shape.split(), *free.split()}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in any_value and value != field.default:
                raise ValueError(f"{field.name} is {value!r}, which {why}")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def rotary_width(self) -> int:
        """Number of features of each head that are rotated."""
        return int(self.head_width * self.rope_fraction)

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Numbers of rows of the fused matrix for queries, keys and values."""
        keys = self.kv_heads * self.head_width
        return self.num_heads * self.head_width, keys, keys

    @property
    def is_gated(self) -> bool:
        return FEED_FORWARD_MATRICES[self.feed_forward] == 3

    def window_of(self, layer: int) -> int:
        """Returns how many tokens, including itself, a token sees in this block; 0: no limit."""
        every = self.full_attention_every
        is_full = every > 0 and (layer + 1) % every == 0
        return 0 if is_full or self.window >= self.context_length else self.window


def _contradictions(spec: NetworkFields) -> Iterator[str]:
    """Yields a message for each contradiction between fields."""
    is_plain_swiglu = spec.feed_forward == "swiglu" and not (
        spec.num_experts or spec.feed_forward_bias
    )
    if spec.gate != "torch" and not is_plain_swiglu:
        yield f"gate is {spec.gate!r}, which needs swiglu without experts and biases: choose torch"
    yield from _contradictions_in_attention(spec)
    if spec.experts_per_token > spec.num_experts:
        yield (
            f"experts_per_token is {spec.experts_per_token}; it must be at most num_experts, "
            f"{spec.num_experts}"
        )
    if spec.num_experts and not spec.experts_per_token:
        yield f"num_experts is {spec.num_experts}; give experts_per_token too"
    if spec.num_experts and spec.feed_forward_bias:
        yield "feed_forward_bias is True; experts have no biases: leave it out"


def _contradictions_in_attention(spec: NetworkFields) -> Iterator[str]:
    if not spec.head_dim and spec.d_model % spec.num_heads:
        yield (
            f"num_heads is {spec.num_heads}, which does not divide d_model {spec.d_model}; "
            f"the nearest divisor is {nearest_divisor(spec.d_model, spec.num_heads)}"
        )
    if spec.num_heads % spec.kv_heads:
        yield (
            f"num_kv_heads is {spec.num_kv_heads}, which does not divide num_heads "
            f"{spec.num_heads}; the nearest divisor is "
            f"{nearest_divisor(spec.num_heads, spec.num_kv_heads)}"
        )
    if spec.positions == "rope" and spec.rotary_width % 2:
        yield (
            f"num_heads is {spec.num_heads}, which gives heads of odd width {spec.head_width}; "
            "rotary positions need an even one"
            if spec.rope_fraction == 1.0 and not spec.head_dim
            else f"rope_fraction is {spec.rope_fraction:g}, which rotates {spec.rotary_width} of "
            f"{spec.head_width} features; their number must be even"
        )
    if spec.positions == "learned" and 0 < spec.num_positions < spec.context_length:
        yield (
            f"context_length is {spec.context_length}; it must be at most num_positions, "
            f"{spec.num_positions}"
        )
    if spec.window and spec.mask == "full":
        yield f"window is {spec.window}, which needs the causal mask: leave it out"


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of `number` closest to `wanted`; of two, the smaller one."""
    return min(divisors(number), key=lambda divisor: abs(divisor - wanted))
