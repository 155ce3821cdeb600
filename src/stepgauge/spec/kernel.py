"""The specs of `bench kernel`: one operation on one shape."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import DEVICE_HELP, check, option

DTYPES = ("fp32", "bf16", "fp16")
OURS = "ours"
AUTO = "auto"
# A forward without gradients, a backward only (on a retained graph), and both as in training.
PASSES = ("forward", "backward", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Fields of all operations. `shape` names the fields that are the size of the operation."""

    kind: ClassVar[str]
    shape: ClassVar[tuple[str, ...]]
    passes_offered: ClassVar[tuple[str, ...]] = PASSES

    dtype: str = option("bf16", "dtype of the tensors", choices=DTYPES, label=True)
    passes: str = option(
        "both",
        "forward without gradients, backward only, or both; a grid sets its own",
        choices=PASSES,
        label=True,
    )
    peers: str = option(
        AUTO, "Implementations to compare with, by name; auto: all that are installed"
    )
    seconds: float = option(0.2, "Seconds of timing per implementation", least=0.0, most=3600.0)
    device: str = option("cpu", DEVICE_HELP)
    seed: int = option(0, "Seed of the inputs", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        check(self)
        if self.passes not in self.passes_offered:
            raise ValueError(
                f"passes is {self.passes!r}; {self.kind} supports {', '.join(self.passes_offered)}"
            )

    @property
    def named_peers(self) -> tuple[str, ...]:
        """The requested peers by name; empty if all that are installed are meant."""
        return () if self.peers == AUTO else tuple(self.peers.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormSpec(KernelSpec):
    """RMSNorm over the last dimension of (rows, width), with a gain of the same dtype."""

    kind: ClassVar[str] = "rms-norm"
    shape: ClassVar[tuple[str, ...]] = ("rows", "width")

    rows: int = option(2048, "Number of rows", least=1, most=2**31)
    width: int = option(2560, "Elements per row", least=1, most=65536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(KernelSpec):
    """Attention with as many keys as queries: q, k and v are (batch, heads, sequence, width)."""

    kind: ClassVar[str] = "attention"
    shape: ClassVar[tuple[str, ...]] = ("batch", "heads", "sequence", "width")

    batch: int = option(4, "Number of sequences", least=1, most=1_000_000)
    heads: int = option(16, "Number of heads", least=1, most=100_000)
    sequence: int = option(512, "Tokens per sequence", least=1, most=16_777_216)
    width: int = option(64, "Width of a head", least=1, most=256)
    causal: bool = option(
        True,
        "Causal mask: each token sees itself and earlier tokens",
        flag_value=True,
        label="changed",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropySpec(KernelSpec):
    """Output layer and mean cross-entropy of (tokens, width) against (vocabulary, width).

    This package's kernel computes its gradients in forward, so timing only backward makes no sense.
    """

    kind: ClassVar[str] = "linear-cross-entropy"
    shape: ClassVar[tuple[str, ...]] = ("tokens", "width", "vocabulary")
    passes_offered: ClassVar[tuple[str, ...]] = ("forward", "both")

    tokens: int = option(2048, "Number of tokens", least=1, most=2**31)
    width: int = option(2560, "Width of the hidden states", least=1, most=1_000_000)
    vocabulary: int = option(10_000, "Rows of the output matrix", least=2, most=10_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWSpec(KernelSpec):
    """One AdamW step over Transformer blocks with gated feed-forward layers of 4 x width."""

    kind: ClassVar[str] = "adamw"
    shape: ClassVar[tuple[str, ...]] = ("layers", "width")
    passes_offered: ClassVar[tuple[str, ...]] = ("step",)

    passes: str = option("step", "Only step: there is no backward", choices=("step",))
    layers: int = option(4, "Number of blocks, each with nine tensors", least=1, most=10_000)
    width: int = option(768, "Width of the network", least=1, most=1_000_000)

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        hidden = 4 * self.width
        block: list[tuple[int, ...]] = [(self.width, self.width)] * 4
        block += [(hidden, self.width)] * 2 + [(self.width, hidden)] + [(self.width,)] * 2
        return block * self.layers

    @property
    def num_parameters(self) -> int:
        return self.layers * (16 * self.width**2 + 2 * self.width)


KERNELS: dict[str, type[KernelSpec]] = {
    spec.kind: spec for spec in (RmsNormSpec, AttentionSpec, LinearCrossEntropySpec, AdamWSpec)
}
