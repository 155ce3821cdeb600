"""The shapes that rows are asked for, by name: a grid is a list of the fields in which its rows
differ.

default   one everyday shape in all passes
anchors   where peers were measured before: the targets
norm-layers, attention-batch, attention-heads
          the grids of published write-ups on norm layers and attention
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from stepgauge.spec.kernel import KERNELS

Point = Mapping[str, Any]


def product(**values: Iterable[Any]) -> list[Point]:
    """All combinations; the first field varies slowest."""
    return [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]


def names_of(kind: str) -> list[str]:
    return ["default", *GRIDS[kind]]


def points(kind: str, name: str) -> list[Point]:
    """The grid's points. Raises ValueError for a grid that the operation does not have."""
    if name == "default":
        return product(passes=KERNELS[kind].passes_offered)
    if name not in GRIDS[kind]:
        raise ValueError(f"grid is {name!r}; {kind} has {', '.join(names_of(kind))}")
    return GRIDS[kind][name]


def _rows(names: str, *values: tuple[Any, ...]) -> list[Point]:
    """Points of these fields, a tuple each."""
    return [dict(zip(names.split(), each, strict=True)) for each in values]


def _each(shapes: Iterable[Point], **values: Iterable[Any]) -> list[Point]:
    return [{**shape, **rest} for shape in shapes for rest in product(**values)]


FORWARD_BACKWARD = ("forward", "backward")
# The most wanted first. A peer that is compiled for each shape costs 5 to 30 s before it is timed:
# compiled eager code and those that no shape was ever fastest with stand in the first row alone.
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

# 16,384 tokens of width 2048 in all: batch and heads follow from the length and the width of a
# head.
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
    # One sequence of 16 heads.
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
