"""Compares communication with the computation that could hide it, by closed formula, for each axis.

The ratio is the time of communication over that of computation. Below 1, communication can be hidden, if
nothing else uses the wires and contention is ignored.

Legend: P weights of a block, M tokens of a rank, D model width, N ranks of the axis, L blocks of a stage,
F FLOP/s, B bytes per second that a rank sends; g, w, a, r bytes of a value of gradients, weights,
activations and the residual stream.
"""

import dataclasses

FORWARD_FLOPS, BACKWARD_FLOPS = 2, 4  # per weight and token


@dataclasses.dataclass(frozen=True)
class OverlapRatio:
    """Time of communication over time of the computation that could hide it.

    depends_on  what the ratio depends on
    waits       computation waits for the communication in this layout, although it could be hidden
    """

    name: str
    ratio: float
    depends_on: str
    waits: bool = False

    @property
    def hides(self) -> bool:
        return self.ratio < 1.0 and not self.waits


def _share(ranks: int) -> float:
    """Returns (N-1)/N, the fraction of a tensor that a rank of a ring sends once."""
    return (ranks - 1) / ranks


def data_parallel(
    *, ranks: int, tokens: float, gradient_bytes: float, flops_per_s: float, bytes_per_s: float
) -> OverlapRatio:
    """Compares the all-reduce of a block's gradients with its backward.

    The ratio is 2 (N-1)/N · P g / B over 4 M P / F; P cancels out.
    """
    sent = 2 * _share(ranks) * gradient_bytes / bytes_per_s
    computed = BACKWARD_FLOPS * tokens / flops_per_s
    name = f"gradients over {ranks} data ranks, during backward"
    return OverlapRatio(name, sent / computed, "the tokens of a rank's step")


def sharded(
    *, ranks: int, tokens: float, weight_bytes: float, flops_per_s: float, bytes_per_s: float
) -> tuple[OverlapRatio, OverlapRatio]:
    """Compares ZeRO 3's communication, one block ahead, with forward and with backward.

    In forward, it all-gathers the next block's weights: (N-1)/N · P w / B over 2 M P / F. In backward, it
    all-gathers and reduce-scatters, over 4 M P / F. Both ratios are the same.
    """
    sent = _share(ranks) * weight_bytes / bytes_per_s
    forward = sent / (FORWARD_FLOPS * tokens / flops_per_s)
    backward = 2 * sent / (BACKWARD_FLOPS * tokens / flops_per_s)
    on = "the tokens of a rank's micro-batch"
    return (
        OverlapRatio(f"weights gathered over {ranks} ranks, during forward", forward, on),
        OverlapRatio(f"weights and gradients over {ranks} ranks, during backward", backward, on),
    )


def tensor(
    *,
    ranks: int,
    width: float,
    block_weights: float,
    value_bytes: float,
    flops_per_s: float,
    bytes_per_s: float,
    waits: bool,
) -> OverlapRatio:
    """Compares two all-gathers and two reduce-scatters of (M, D) with the forward of a block.

    The ratio is 4 (N-1)/N · M D a / B over 2 M P / (N F); M cancels out. If the layout does not overlap
    them, computation `waits`.
    """
    sent = 4 * _share(ranks) * width * value_bytes / bytes_per_s
    computed = FORWARD_FLOPS * block_weights / ranks / flops_per_s
    name = f"activations over {ranks} tensor ranks, during a block"
    return OverlapRatio(name, sent / computed, "the width and the number of ranks only", waits)


def pipeline(
    *,
    blocks: float,
    width: float,
    block_weights: float,
    value_bytes: float,
    flops_per_s: float,
    bytes_per_s: float,
) -> OverlapRatio:
    """Compares sending (M, D) to the next stage with the forward of a stage's blocks.

    The ratio is M D r / B over 2 M P L / F; M cancels out.
    """
    sent = width * value_bytes / bytes_per_s
    computed = FORWARD_FLOPS * blocks * block_weights / flops_per_s
    name = f"activations between stages of {blocks:g} blocks, during a stage"
    return OverlapRatio(name, sent / computed, "the width and the blocks of a stage")


def typical_scales(
    *, tokens: float, width: float, blocks: float, block_weights: float, vocabulary: float
) -> dict[str, float]:
    """Returns orders of magnitude of a step: values, weights and FLOPs."""
    weights = blocks * block_weights + 2 * vocabulary * width
    return {
        "values of a hidden state": tokens * width,
        "weights of a block": block_weights,
        "weights of embedding and head": 2 * vocabulary * width,
        "weights in all": weights,
        "forward FLOPs": FORWARD_FLOPS * tokens * (weights - vocabulary * width),
        "backward FLOPs": BACKWARD_FLOPS * tokens * (weights - vocabulary * width),
    }
