"""One operation on one shape as it is asked for: what `bench kernel` measures for a row."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import check, option

DTYPES = ("fp32", "bf16", "fp16")
OURS = "ours"
AUTO = "auto"
# A forward without gradients, a backward alone on a graph that is kept, and the two as training
# runs them.
PASSES = ("forward", "backward", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What all operations' rows have. `shape` names the fields of a row's size."""

    kind: ClassVar[str]
    shape: ClassVar[tuple[str, ...]]
    passes_offered: ClassVar[tuple[str, ...]] = PASSES

    dtype: str = option("bf16", "type of the tensors", choices=DTYPES, label=True)
    passes: str = option(
        "both",
        "forward without gradients, backward alone, or both in turn; a grid has its own",
        choices=PASSES,
        label=True,
    )
    peers: str = option(AUTO, "names of the implementations beside ours")
    seconds: float = option(0.2, "of timing for each implementation", least=0.0, most=3600.0)
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")
    seed: int = option(0, "of the inputs", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        check(self)
        if self.passes not in self.passes_offered:
            raise ValueError(
                f"passes is {self.passes!r}; {self.kind} has {', '.join(self.passes_offered)}"
            )

    @property
    def named_peers(self) -> tuple[str, ...]:
        """The peers asked for by name, none where all that are installed are meant."""
        return () if self.peers == AUTO else tuple(self.peers.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormSpec(KernelSpec):
    """RMSNorm over the last dimension of (rows, width), gain in the same type."""

    kind: ClassVar[str] = "rms-norm"
    shape: ClassVar[tuple[str, ...]] = ("rows", "width")

    rows: int = option(2048, "rows", least=1, most=2**31)
    width: int = option(2560, "elements of a row", least=1, most=65536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(KernelSpec):
    """Attention of as many keys as queries: q, k and v of (batch, heads, sequence, width)."""

    kind: ClassVar[str] = "attention"
    shape: ClassVar[tuple[str, ...]] = ("batch", "heads", "sequence", "width")

    batch: int = option(4, "sequences", least=1, most=1_000_000)
    heads: int = option(16, "heads", least=1, most=100_000)
    sequence: int = option(512, "positions of a sequence", least=1, most=16_777_216)
    width: int = option(64, "width of a head", least=1, most=256)
    causal: bool = option(
        True, "each position sees itself and those before it", flag_value=True, label="changed"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropySpec(KernelSpec):
    """Output layer and mean cross-entropy of (tokens, width) against (vocabulary, width).

    Ours forms its gradients in the forward, so that a backward alone would say nothing of it.
    """

    kind: ClassVar[str] = "linear-cross-entropy"
    shape: ClassVar[tuple[str, ...]] = ("tokens", "width", "vocabulary")
    passes_offered: ClassVar[tuple[str, ...]] = ("forward", "both")

    tokens: int = option(2048, "tokens", least=1, most=2**31)
    width: int = option(2560, "width of the model", least=1, most=1_000_000)
    vocabulary: int = option(10_000, "rows of the output matrix", least=2, most=10_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWSpec(KernelSpec):
    """One AdamW step over gated Transformer blocks, four widths to their feed-forward."""

    kind: ClassVar[str] = "adamw"
    shape: ClassVar[tuple[str, ...]] = ("layers", "width")
    passes_offered: ClassVar[tuple[str, ...]] = ("step",)

    passes: str = option("step", "an optimizer has its step alone", choices=("step",))
    layers: int = option(4, "blocks, of nine tensors each", least=1, most=10_000)
    width: int = option(768, "width of the model", least=1, most=1_000_000)

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        wide = 4 * self.width
        block: list[tuple[int, ...]] = [(self.width, self.width)] * 4
        block += [(wide, self.width)] * 2 + [(self.width, wide)] + [(self.width,)] * 2
        return block * self.layers

    @property
    def num_parameters(self) -> int:
        return self.layers * (16 * self.width**2 + 2 * self.width)


KERNELS: dict[str, type[KernelSpec]] = {
    spec.kind: spec for spec in (RmsNormSpec, AttentionSpec, LinearCrossEntropySpec, AdamWSpec)
}
