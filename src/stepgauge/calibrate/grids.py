"""Which shapes are timed on which kind of device: those that steps have there."""

import dataclasses
import itertools
from collections.abc import Mapping

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes by what they are, and how large their combinations may be.

    widths        of layers, by the type of products
    tokens        rows of products, by that type
    few_widths, few_tokens   of norms and losses
    largest       multiply-adds of a product, by that type
    largest_weight  elements of a product's weight
    most_uneven   width of a layer over its other width
    batched       heads times batch, lengths and head widths of attention that is written out
    grouped       experts, tokens and both widths of products of experts in bf16
    heads         times batch, of attention; `most_positions` limits heads times length
    losses_most   logits
    slow_attentions   that take long to be built, or are seldom asked for: in bf16, over few shapes
    passes        elementwise work as the network does it (calibrate/passes.py), and what compiled
                  blocks do, at its shapes
    takes_turns   bf16 products with passes over memory, and passes with products, as in a step
    longest_s     of one operation over all its shapes
    """

    widths: Mapping[str, Shape]
    tokens: Mapping[str, Shape]
    few_widths: Shape
    few_tokens: Shape
    largest: Mapping[str, int]
    largest_weight: int
    most_uneven: int
    batched: tuple[Shape, Shape, Shape]
    grouped: tuple[Shape, Shape, Shape, Shape]
    heads: Shape
    lengths: Shape
    head_widths: Shape
    most_positions: int
    attentions: tuple[str, ...]
    slow_attentions: tuple[str, ...]
    vocabularies: Shape
    losses_most: int
    optimizers: tuple[str, ...]
    parameters: Shape
    bytes: Shape
    passes: tuple[str, ...]
    compiled_passes: tuple[str, ...]
    compiled_shapes: tuple[Shape, ...]
    takes_turns: bool
    longest_s: float

    def products(self, dtype: str) -> list[Shape]:
        """(tokens, width, width), the smallest products first."""
        widths = self.widths[dtype]
        return sorted(
            (
                (m, n, k)
                for m, n, k in itertools.product(self.tokens[dtype], widths, widths)
                if max(n, k) <= self.most_uneven * min(n, k)
                and n * k <= self.largest_weight
                and m * n * k <= self.largest[dtype]
            ),
            key=lambda shape: shape[0] * shape[1] * shape[2],
        )

    def batched_products(self) -> list[Shape]:
        """(heads times batch, M, N, K) of attention that is written out."""
        return [
            shape
            for h, t, d in itertools.product(*self.batched)
            for shape in ((h, t, t, d), (h, t, d, t), (h, d, t, t))
        ]

    def attention_shapes(self, name: str, dtype: str) -> list[Shape]:
        """(heads times batch, length, width of a head)."""
        if name in self.slow_attentions:
            few = itertools.product((32,), (512, 4096), (64, 128))
            return list(few) if dtype == "bf16" else []
        shapes = itertools.product(self.heads, self.lengths, self.head_widths)
        return [(h, t, d) for h, t, d in shapes if h * t <= self.most_positions]

    def losses(self) -> list[Shape]:
        """(tokens, vocabulary)."""
        pairs = itertools.product(self.few_tokens, self.vocabularies)
        return [(m, v) for m, v in pairs if m * v < self.losses_most]


_FEW_WIDTHS = (512, 1024, 2048, 4096, 8192)
_FEW_TOKENS = (512, 2048, 8192)
# A cuBLAS kernel's rate changes by a tenth between a width and the next of a coarser series.
_WIDTHS = (768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240)
GPU = Grid(
    widths={
        "bf16": (512, *_WIDTHS, 12288, 16384, 20480),
        "tf32": _FEW_WIDTHS,
        "fp32": _WIDTHS,
    },
    tokens={
        "bf16": (256, 512, 1024, 2048, 4096, 8192),
        "tf32": _FEW_TOKENS,
        "fp32": (512, 1024, 2048, 4096),
    },
    few_widths=_FEW_WIDTHS,
    few_tokens=_FEW_TOKENS,
    largest={"bf16": 2**40, "tf32": 2**40, "fp32": 2**35},
    largest_weight=2**26,
    most_uneven=8,
    batched=((32, 128), (512, 1024, 2048), (64, 128)),
    grouped=((4, 8), (4096, 16384), (1024, 4096, 8192), (1024, 4096)),
    heads=(8, 32, 128),
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192),
    head_widths=(64, 80, 128),
    most_positions=2**19,
    attentions=("sdpa", "sdpa-full", "triton", "triton-full", "sdpa-flash", "sdpa-cudnn"),
    slow_attentions=("sdpa-full", "triton", "triton-full", "sdpa-flash", "sdpa-cudnn"),
    vocabularies=(10_000, 32_000, 128_256),
    losses_most=2**29,
    optimizers=("adamw", "fused"),
    parameters=tuple(2**power for power in (20, 22, 24, 26, 28, 29)),
    bytes=tuple(2**power for power in range(14, 31, 2)),
    passes=("heads", "split", "gate", "gelu"),
    compiled_passes=("heads", "gate", "norm"),
    compiled_shapes=((4096, 4096),),
    takes_turns=True,
    longest_s=24.0,
)
# Of the presets from nano to small, whose steps end soon on a CPU. Our kernels do not run there.
_CPU_WIDTHS = (64, 256, 1024, 3072)
CPU = Grid(
    widths={"fp32": (*_CPU_WIDTHS, 10_000), "bf16": (*_CPU_WIDTHS, 10_000)},
    tokens=dict.fromkeys(("fp32", "bf16"), (64, 512, 2048)),
    few_widths=_CPU_WIDTHS,
    few_tokens=(64, 512, 2048),
    largest=dict.fromkeys(("fp32", "bf16"), 2**31),
    largest_weight=2**31,
    most_uneven=160,
    batched=((4, 16), (64, 256), (32, 64)),
    grouped=((), (), (), ()),
    heads=(4, 16, 64),
    lengths=(64, 128, 256, 512, 1024),
    head_widths=(32, 64),
    most_positions=2**14,
    attentions=("sdpa",),
    slow_attentions=(),
    vocabularies=(1000, 10_000, 32_000),
    losses_most=2**25,
    optimizers=("adamw",),
    parameters=tuple(2**power for power in (14, 16, 18, 20, 22, 24)),
    bytes=tuple(2**power for power in range(14, 27, 2)),
    passes=(),
    compiled_passes=(),
    compiled_shapes=(),
    takes_turns=False,
    longest_s=2.0,
)


def grid_of(device_type: str) -> Grid:
    return CPU if device_type == "cpu" else GPU
