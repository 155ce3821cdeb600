"""Named grids of `bench kernel`: each is a list of points, the fields in which its rows differ.

default   one common shape in all passes
anchors   shapes at which other implementations are usually compared
norm-layers, attention-batch, attention-heads
          the grids of published benchmarks of norm layers and attention
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from stepgauge.spec.kernel import KERNELS

Point = Mapping[str, Any]


def product(**values: Iterable[Any]) -> list[Point]:
    """Returns all combinations; the first field varies slowest."""
    return [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]


def names_of(kind: str) -> list[str]:
    """Returns the names of the operation's grids."""
    return ["default", *GRIDS[kind]]


def points(kind: str, name: str) -> list[Point]:
    """Returns the points of a grid. Raises ValueError if the operation has no such grid."""
    if name == "default":
        return product(passes=KERNELS[kind].passes_offered)
    if name not in GRIDS[kind]:
        raise ValueError(f"grid is {name!r}; choose one of {', '.join(names_of(kind))}")
    return GRIDS[kind][name]


def _rows(names: str, *values: tuple[Any, ...]) -> list[Point]:
    """Returns one point per tuple of values; `names` are the fields, separated by spaces."""
    return [dict(zip(names.split(), point, strict=True)) for point in values]


def _each(shapes: Iterable[Point], **values: Iterable[Any]) -> list[Point]:
    """Returns every shape combined with every combination of the values."""
    return [{**shape, **rest} for shape in shapes for rest in product(**values)]


FORWARD_BACKWARD = ("forward", "backward")
# The most important rows come first. A peer that is compiled for each shape takes 5 to 30 s before it
# is timed, so torch.compile and peers that were never the fastest are only in the first row.
RMS_NORM_ANCHORS = [
    *_rows(
        "rows width dtype passes peers",
        (2048, 2560, "bf16", "both", "eager torch compile liger quack"),
    ),
    *_each(
        _rows(
            "rows width dtype",
            (50_000, 4096, "bf16"),
            (16384, 16384, "fp32"),
            (50_000, 1024, "bf16"),
            (16384, 16384, "bf16"),
            (50_000, 4096, "fp32"),
            (50_000, 1024, "fp32"),
            (50_000, 8192, "fp32"),
        ),
        passes=FORWARD_BACKWARD,
        peers=("torch liger quack",),
    ),
]
NORM_LAYERS = product(
    rows=(50_000,),
    width=(1024, 2048, 4096, 8192),
    dtype=("fp32",),
    passes=("forward", "both"),
    peers=("eager torch compile layer_norm",),
)

# 16,384 tokens and a model width of 2048: batch and heads follow from sequence and head width.
_MAIN_PEERS = "fa2 cudnn"
ATTENTION_ANCHORS = [
    *_each(
        _rows(
            "batch heads sequence width causal",
            *(
                (16_384 // length, 2048 // width, length, width, causal)
                for length in (16_384, 2048, 8192, 512)
                for width in (128, 64)
                for causal in ((True, False) if length == 16_384 else (True,))
            ),
        ),
        dtype=("bf16",),
        peers=(_MAIN_PEERS,),
        passes=FORWARD_BACKWARD,
    ),
    # One sequence with 16 heads.
    *_rows("batch heads sequence width peers passes", (1, 16, 16_384, 64, _MAIN_PEERS, "both")),
]
ATTENTION_BATCH = product(
    batch=(8,),
    heads=(1,),
    width=(16, 32, 64, 128),
    sequence=(256, 1024, 4096, 8192, 16_384),
    causal=(False,),
    dtype=("fp32",),
    peers=("eager compile efficient",),
    passes=FORWARD_BACKWARD,
)
ATTENTION_HEADS = product(
    batch=(1,),
    heads=(1,),
    dtype=("bf16", "fp32"),
    width=(64, 128, 16, 32),
    sequence=tuple(2**power for power in range(7, 17)),
    causal=(True,),
    peers=("eager fa2 cudnn efficient",),
    passes=("forward", "backward", "both"),
)

LINEAR_CROSS_ENTROPY_ANCHORS = _each(
    _rows(
        "tokens width vocabulary",
        (2048, 2560, 10_000),
        (16_384, 4096, 128_256),
        (16_384, 2048, 50_257),
        (8192, 4096, 32_000),
    ),
    dtype=("bf16",),
    peers=("eager compile liger",),
    passes=("both",),
)
ADAMW_ANCHORS = _each(_rows("layers width", (24, 1280), (12, 768)), dtype=("fp32", "bf16"))

GRIDS: Mapping[str, Mapping[str, list[Point]]] = {
    "rms-norm": {"anchors": RMS_NORM_ANCHORS, "norm-layers": NORM_LAYERS},
    "attention": {
        "anchors": ATTENTION_ANCHORS,
        "attention-batch": ATTENTION_BATCH,
        "attention-heads": ATTENTION_HEADS,
    },
    "linear-cross-entropy": {"anchors": LINEAR_CROSS_ENTROPY_ANCHORS},
    "adamw": {"anchors": ADAMW_ANCHORS},
}
