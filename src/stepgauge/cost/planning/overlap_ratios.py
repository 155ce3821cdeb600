"""Communication against the computing that could hide it, by closed formula: one ratio an axis, and
the sentence that says whether it hides.

A ratio is time of communication over time of computing, each at the rate that it reaches; below 1
it hides, if nothing else uses the wires and contention is left out. P is a block's weights, M the
tokens of a rank, D the width, N the ranks of the axis, F FLOP/s, B bytes a second that a rank sends.
"""

import dataclasses

FORWARD_FLOPS, BACKWARD_FLOPS = 2, 4  # a weight and token


@dataclasses.dataclass(frozen=True)
class OverlapRatio:
    """What travels, over what is computed meanwhile; `depends_on` names what can be changed.

    waits  computing waits for it: it could hide, and does not here
    """

    name: str
    ratio: float
    depends_on: str
    waits: bool = False

    @property
    def hides(self) -> bool:
        return self.ratio < 1.0 and not self.waits

    @property
    def sentence(self) -> str:
        verdict = "and can hide" if self.hides else "too much to hide"
        if self.waits:
            verdict = "but computing waits for it"
        return (
            f"{self.name}: sending takes {self.ratio:.2f} of the time of computing, {verdict}; "
            f"the ratio depends on {self.depends_on}."
        )


def _share(ranks: int) -> float:
    """(N-1)/N: the part of a tensor that a rank of a ring sends once."""
    return (ranks - 1) / ranks


def data_parallel(
    *, ranks: int, tokens: float, gradient_bytes: float, flops_per_s: float, bytes_per_s: float
) -> OverlapRatio:
    """All-reduce of a block's gradients against its backward:
    2 (N-1)/N · P g / B over 4 M P / F. The width drops out.
    """
    sent = 2 * _share(ranks) * gradient_bytes / bytes_per_s
    computed = BACKWARD_FLOPS * tokens / flops_per_s
    name = f"gradients over {ranks} data ranks, against backward"
    return OverlapRatio(name, sent / computed, "the tokens of a rank's step")


def sharded(
    *, ranks: int, tokens: float, weight_bytes: float, flops_per_s: float, bytes_per_s: float
) -> tuple[OverlapRatio, OverlapRatio]:
    """ZeRO 3, a block ahead: all-gather of its weights against the forward of the one before,
    (N-1)/N · P w / B over 2 M P / F; in backward all-gather and reduce-scatter against 4 M P / F.
    The same ratio for both.
    """
    sent = _share(ranks) * weight_bytes / bytes_per_s
    forward = sent / (FORWARD_FLOPS * tokens / flops_per_s)
    backward = 2 * sent / (BACKWARD_FLOPS * tokens / flops_per_s)
    on = "the tokens of a rank's micro-batch"
    return (
        OverlapRatio(f"weights gathered over {ranks} ranks, against forward", forward, on),
        OverlapRatio(f"weights and gradients over {ranks} ranks, against backward", backward, on),
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
    """Two all-gathers and two reduce-scatters of (M, D) a block, against its forward:
    4 (N-1)/N · M D a / B over 2 M P / (N F). The tokens drop out. Unless the layout overlaps them,
    computing waits.
    """
    sent = 4 * _share(ranks) * width * value_bytes / bytes_per_s
    computed = FORWARD_FLOPS * block_weights / ranks / flops_per_s
    name = f"activations over {ranks} tensor ranks, against a block"
    return OverlapRatio(name, sent / computed, "the width and the ranks alone", waits)


def pipeline(
    *,
    blocks: float,
    width: float,
    block_weights: float,
    value_bytes: float,
    flops_per_s: float,
    bytes_per_s: float,
) -> OverlapRatio:
    """(M, D) from stage to stage against the blocks of a stage: M D r / B over 2 M P L / F. Batch
    and sequence drop out.
    """
    sent = width * value_bytes / bytes_per_s
    computed = FORWARD_FLOPS * blocks * block_weights / flops_per_s
    name = f"activations between stages of {blocks:g} blocks, against a stage"
    return OverlapRatio(name, sent / computed, "the width and the blocks of a stage")


def typical_scales(
    *, tokens: float, width: float, blocks: float, block_weights: float, vocabulary: float
) -> dict[str, float]:
    """Orders of magnitude of a step: values of a hidden state, weights of a block, of the
    embeddings and of all, FLOPs of forward and backward.
    """
    weights = blocks * block_weights + 2 * vocabulary * width
    return {
        "values of a hidden state": tokens * width,
        "weights of a block": block_weights,
        "weights of embedding and head": 2 * vocabulary * width,
        "weights in all": weights,
        "forward FLOPs": FORWARD_FLOPS * tokens * (weights - vocabulary * width),
        "backward FLOPs": BACKWARD_FLOPS * tokens * (weights - vocabulary * width),
    }
