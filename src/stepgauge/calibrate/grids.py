"""The shapes that are timed on each kind of device, as steps have them there."""

import dataclasses
import itertools
from collections.abc import Mapping

Shape = tuple[int, ...]
LONG = 32768  # tokens; attention from 8192 on cannot be extrapolated to it within 5 %


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of operations, and limits on their combinations.

    widths, tokens       of matrix products, by dtype
    coarse_widths, coarse_tokens  of norms and losses
    max_multiply_adds    of a product, by dtype
    max_weight           elements of a product's weight
    max_aspect_ratio     one width of a layer divided by the other
    batched              heads times batch, lengths and head widths of eager attention's products
    unaligned            tokens, vocabularies (plus 1 or 2) and widths of the head's products in 16 bits
    grouped              experts, tokens and both widths of the products of experts in bf16
    heads                heads times batch of attention, by dtype; `max_pairs` limits the pairs of positions
                         of all heads
    slow_attentions      attentions that take long to build or are rarely used; timed in bf16, over few
                         shapes
    max_logits           of a loss
    passes               elementwise work of the network (calibrate/passes.py)
    compiled_passes      the same in compiled blocks, at `compiled_shapes`
    alternates           bf16 products alternate with passes over memory, and passes with products, as in
                         a step
    time_limit_s         of one operation over all its shapes
    """

    widths: Mapping[str, Shape]
    tokens: Mapping[str, Shape]
    coarse_widths: Shape
    coarse_tokens: Shape
    max_multiply_adds: Mapping[str, int]
    max_weight: int
    max_aspect_ratio: int
    batched: tuple[Shape, Shape, Shape]
    unaligned: tuple[Shape, Shape, Shape]
    grouped: tuple[Shape, Shape, Shape, Shape]
    heads: Mapping[str, Shape]
    lengths: Shape
    head_widths: Shape
    max_pairs: int
    attentions: tuple[str, ...]
    slow_attentions: tuple[str, ...]
    vocabularies: Shape
    max_logits: int
    optimizers: tuple[str, ...]
    parameters: Shape
    bytes: Shape
    passes: tuple[str, ...]
    compiled_passes: tuple[str, ...]
    compiled_shapes: tuple[Shape, ...]
    alternates: bool
    time_limit_s: float

    def products(self, dtype: str) -> list[Shape]:
        """Returns (tokens, width, width) of products, the smallest first."""
        widths = self.widths[dtype]
        return sorted(
            (
                (m, n, k)
                for m, n, k in itertools.product(self.tokens[dtype], widths, widths)
                if max(n, k) <= self.max_aspect_ratio * min(n, k)
                and n * k <= self.max_weight
                and m * n * k <= self.max_multiply_adds[dtype]
            ),
            key=lambda shape: shape[0] * shape[1] * shape[2],
        )

    def batched_products(self) -> list[Shape]:
        """Returns (heads times batch, M, N, K) of eager attention's products."""
        return [
            shape
            for h, t, d in itertools.product(*self.batched)
            for shape in ((h, t, t, d), (h, t, d, t), (h, d, t, t))
        ]

    def attention_shapes(self, name: str, dtype: str) -> list[Shape]:
        """Returns (heads times batch, length, head width)."""
        if name in self.slow_attentions:
            few = itertools.product((32,), (512, 4096, LONG), (64, 128))
            return list(few) if dtype == "bf16" else []
        lengths = (*self.lengths, LONG) if dtype == "bf16" else self.lengths
        shapes = itertools.product(self.heads[dtype], lengths, self.head_widths)
        return [(h, t, d) for h, t, d in shapes if h * t * t <= self.max_pairs]

    def losses(self) -> list[Shape]:
        """Returns (tokens, vocabulary) of losses."""
        pairs = itertools.product(self.coarse_tokens, self.vocabularies)
        return [(m, v) for m, v in pairs if m * v < self.max_logits]


_FEW_WIDTHS = (512, 1024, 2048, 4096, 8192)
_FEW_TOKENS = (512, 2048, 8192)
# A finer series: in _FEW_WIDTHS, the rate of cuBLAS changes by a tenth from one width to the next.
_WIDTHS = (768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240)
GPU = Grid(
    widths={
        # Narrow outputs have few tiles: products of widths between took up to 26 % longer than interpolated.
        "bf16": tuple(sorted((512, 1600, 1792, 2304, *_WIDTHS, 12288, 16384, 20480))),
        "tf32": _FEW_WIDTHS,
        "fp32": tuple(sorted((1600, *_WIDTHS))),
    },
    tokens={
        "bf16": (256, 512, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 16384, 32768),
        "tf32": _FEW_TOKENS,
        # Powers of two fill 132 multiprocessors with tiles of 128 rows, others do not.
        "fp32": (512, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192),
    },
    coarse_widths=_FEW_WIDTHS,
    coarse_tokens=(512, 1024, 2048, 4096, 8192, 32768),
    max_multiply_adds={"bf16": 2**40, "tf32": 2**40, "fp32": 2**36},
    max_weight=2**26,
    max_aspect_ratio=8,
    batched=((32, 128), (512, 1024, 2048), (64, 128)),
    unaligned=((2048, 8192), (10_000, 50_256), (768, 4096)),
    grouped=((4, 8), (4096, 16384), (1024, 4096, 8192), (1024, 4096)),
    heads={"bf16": (8, 16, 32, 64, 128, 512), "fp32": (8, 16, 32, 64, 128)},
    lengths=(128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    head_widths=(64, 80, 128),
    max_pairs=2**35,
    attentions=("sdpa", "sdpa-full", "triton", "triton-full", "sdpa-flash", "sdpa-cudnn"),
    slow_attentions=("sdpa-full", "triton", "triton-full", "sdpa-flash", "sdpa-cudnn"),
    vocabularies=(10_000, 32_000, 128_256),
    max_logits=2**29,
    optimizers=("adamw", "fused"),
    parameters=tuple(2**power for power in (20, 22, 24, 26, 28, 29)),
    bytes=tuple(2**power for power in range(14, 31, 2)),
    passes=("heads", "split", "gate", "gelu"),
    compiled_passes=("heads", "gate", "norm"),
    compiled_shapes=tuple(itertools.product((4096, 32768), (1024, 2048, 4096, 8192))),
    alternates=True,
    time_limit_s=120.0,  # products take 73 s on an H200
)
# Sizes of the presets nano to small, whose steps are short enough on a CPU. Triton kernels do not run.
_CPU_WIDTHS = (64, 256, 1024, 3072)
CPU = Grid(
    widths={"fp32": (*_CPU_WIDTHS, 10_000), "bf16": (*_CPU_WIDTHS, 10_000)},
    tokens=dict.fromkeys(("fp32", "bf16"), (64, 512, 2048)),
    coarse_widths=_CPU_WIDTHS,
    coarse_tokens=(64, 512, 2048),
    max_multiply_adds=dict.fromkeys(("fp32", "bf16"), 2**31),
    max_weight=2**31,
    max_aspect_ratio=160,
    batched=((4, 16), (64, 256), (32, 64)),
    unaligned=((), (), ()),
    grouped=((), (), (), ()),
    heads=dict.fromkeys(("fp32", "bf16"), (4, 16, 64)),
    lengths=(64, 128, 256, 512, 1024),
    head_widths=(32, 64),
    max_pairs=2**24,
    attentions=("sdpa",),
    slow_attentions=(),
    vocabularies=(1000, 10_000, 32_000),
    max_logits=2**25,
    optimizers=("adamw",),
    parameters=tuple(2**power for power in (14, 16, 18, 20, 22, 24)),
    bytes=tuple(2**power for power in range(14, 27, 2)),
    passes=(),
    compiled_passes=(),
    compiled_shapes=(),
    alternates=False,
    time_limit_s=2.0,
)


def grid_of(device_type: str) -> Grid:
    return CPU if device_type == "cpu" else GPU
