"""What a rank's share of a network keeps for backward, by closed formula: bytes by what is kept.

Legend: M tokens, D model width, F feed-forward width, V vocabulary, A bytes of an activation, R
bytes of the residual stream, all of one rank.
"""

import dataclasses
import math

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Arithmetic
from stepgauge.spec.fused_loss import logits_bytes
from stepgauge.spec.model import ModelSpec

Parts = dict[str, float]
STATISTIC = 4  # bytes of a norm's and attention's value a row, in fp32 whatever the precision


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """Bytes that are kept between forward and backward of one micro-batch.

    blocks   of all blocks of the share, as checkpointing leaves them
    ends     of embedding, head and loss
    again    that the part of blocks that is computed again holds while its backward runs
    """

    blocks: float
    ends: float
    again: float

    @property
    def total(self) -> float:
        return self.blocks + self.ends


def kept(operations: StepOperations) -> KeptBytes:
    """Of one micro-batch, by the checkpointing of the spec."""
    spec, layers = operations.spec, len(operations.blocks)
    whole = sum(of_block(operations).values())
    size = min(spec.checkpoint_blocks, layers)
    inputs = math.ceil(layers / size) * operations.stream_bytes
    ends = sum(of_ends(operations).values())
    if spec.checkpointing == "none":
        return KeptBytes(layers * whole, ends, 0.0)
    if spec.checkpointing == "selective":
        costly = sum(of_products(operations).values())
        return KeptBytes(inputs + layers * costly, ends, size * max(0.0, whole - costly))
    if spec.checkpointing == "feed-forward":  # each block by itself
        costly = sum(of_attention(operations).values())
        inputs = layers * operations.stream_bytes
        return KeptBytes(inputs + layers * costly, ends, max(0.0, whole - costly))
    if spec.checkpointing == "nested":
        return KeptBytes(inputs, ends, size * operations.stream_bytes + whole)
    return KeptBytes(inputs, ends, size * whole)


def of_block(operations: StepOperations) -> Parts:
    """All that autograd keeps of a block without checkpointing. Compiled, the gate's activation is
    computed again (seen in the peaks of five compiled rows: docs/log/2026-11-22-predictions.md), and
    rotated queries and keys stand in place of their product, unless a checkpoint keeps it.
    """
    model, how, n = operations.model, operations.how, operations.share.tensor
    m, a, d = operations.tokens, how.activation, model.d_model
    f, width = model.d_ff // n, model.num_heads * model.head_width // n
    heads = operations.share.batch * model.num_heads // n
    inputs = operations.own_tokens if operations.overlapped else m  # these are gathered again
    found = {
        "norm inputs": 2 * operations.stream_bytes,
        "norm statistics": 2 * operations.own_tokens * STATISTIC,
        "inputs of column layers": 2 * inputs * d * a,
        "queries, keys and values": m * operations.qkv_rows * a,
        "attention output": m * width * a,
        "attention statistics": heads * operations.length * STATISTIC,
        "feed-forward up": (2 if model.is_gated else 1) * m * f * a,
        "feed-forward activation": _gated_results(model, how) * m * f * a,
    }
    keeps_product = operations.spec.checkpointing in ("selective", "feed-forward")
    if model.positions == "rope" and (keeps_product or model.qk_norm or not how.is_compiled):
        found["rotated queries and keys"] = m * operations.rotated_width * a
    if how.casts:
        found["narrow copies of weights"] = narrow_copies(operations)
    return found


def _gated_results(model: ModelSpec, how: Arithmetic) -> int:
    """Tensors as wide as the feed-forward layer that are kept after its first product."""
    if model.gate == "quack":
        return 0
    return 2 if model.is_gated and not how.is_compiled else 1


def narrow_copies(operations: StepOperations) -> float:
    """What autocast makes of a block's weights, and keeps until forward has ended."""
    casts = operations.how.casts
    return sum(operations.block_matrices) * operations.how.activation if casts else 0.0


def of_products(operations: StepOperations) -> Parts:
    """What selective checkpointing keeps of a block: results of products and attention, and what
    ranks sent for them (models/checkpointing.py). Compiled, not the feed-forward layer's, which
    backward does not need.
    """
    found = of_attention(operations)
    found["feed-forward up"] = of_block(operations)["feed-forward up"]
    if not operations.how.is_compiled:
        if operations.model.gate == "quack":  # it comes with the product
            found["feed-forward activation"] = found["feed-forward up"] / 2
        found |= {f"feed-forward {name}": n for name, n in _of_row_layer(operations).items()}
    return found


def of_attention(operations: StepOperations) -> Parts:
    """What feed-forward checkpointing keeps of a block: of attention and of its two products."""
    whole = of_block(operations)
    names = "queries, keys and values", "attention output", "attention statistics"
    found = {name: whole[name] for name in names} | _of_row_layer(operations)
    if operations.share.ulysses:
        found["exchanged heads"] = sum(whole[name] for name in names[:2])
    return found


def _of_row_layer(operations: StepOperations) -> Parts:
    """The output of one, and of several ranks its pieces, which they sent."""
    d, a = operations.model.d_model, operations.how.activation
    found: Parts = {"output of row layer": operations.tokens * d * a}
    if operations.share.tensor > 1 and not operations.overlapped:
        found["pieces of output of row layer"] = operations.own_tokens * d * a
    return found


def of_ends(operations: StepOperations) -> Parts:
    """Of the last norm, the head and the loss, where the share has them."""
    if not operations.is_last:
        return {}
    model, how = operations.model, operations.how
    m, d, v = operations.tokens, model.d_model, model.vocab_size // operations.share.tensor
    found = {
        "last norm": operations.stream_bytes + operations.own_tokens * STATISTIC,
        "input of the head": m * d * how.activation,
    }
    if (
        model.loss == "fused" and not operations.loss_by_torch
    ):  # gradients are formed in forward, a chunk of logits at a time
        return {**found, "gradient of the head": v * d * how.residual}
    found["log-softmax"] = m * v * how.activation  # compiled, the logits themselves
    is_eager_and_whole = not operations.compiles_loss and operations.share.tensor == 1
    if how.activation == 2 and is_eager_and_whole:
        found["logits in fp32"] = m * v * 4
    if how.casts:
        found["narrow copy of the head"] = v * d * how.activation
    return found


def of_loss(operations: StepOperations) -> float:
    """Beside what is kept, when the loss holds most: gradients of the logits in its backward, of
    the fused loss its chunk of logits, and of a loss by parts of the vocabulary its forward.
    """
    if not operations.is_last:
        return 0.0
    m, v = operations.tokens, operations.model.vocab_size // operations.share.tensor
    is_narrow = operations.how.activation == 2
    if operations.model.loss == "fused" and not operations.loss_by_torch:
        limit = logits_bytes(m, operations.model.d_model, v * operations.how.activation)
        return min(limit, m * v * 4)
    if operations.compiles_loss:  # the gradient is written over the logits
        return 0.0
    if operations.share.tensor > 1:
        return m * v * (18 if is_narrow else 12) + _held_by_the_head(operations)
    return m * v * (4 if is_narrow else 8)


def _held_by_the_head(operations: StepOperations) -> float:
    """The last norm's output, and of several sequences what was gathered, before it is copied to
    their order: names in the frames of parallel/tensor_parallel/layers.py.
    """
    gathered = operations.tokens * operations.model.d_model * operations.how.activation
    return operations.stream_bytes + (gathered if operations.share.batch > 1 else 0)


def of_block_backward(operations: StepOperations) -> float:
    """Gradients of a block's widest activations, while its backward runs."""
    model, n = operations.model, operations.share.tensor
    widest = (3 if model.is_gated else 2) * model.d_ff // n + model.d_model
    return operations.tokens * widest * operations.how.activation
