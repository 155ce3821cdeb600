"""Bytes that one rank keeps from forward for backward, by closed formula.

Legend: M tokens, D model width, F feed-forward width, V vocabulary, all of one rank.
"""

import dataclasses
import math

from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Arithmetic
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor import MOST_COPIED_LOGITS

Parts = dict[str, float]
STATISTIC = 4  # bytes per row of a norm or of attention; fp32 in every precision


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """Bytes that are kept between forward and backward of one micro-batch.

    blocks      of all blocks, with the spec's checkpointing
    ends        of embedding, head and loss
    recomputed  held in addition during backward, by what checkpointing recomputes
    """

    blocks: float
    ends: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.blocks + self.ends


def kept(operations: StepOperations) -> KeptBytes:
    """Returns what one micro-batch keeps with the spec's checkpointing."""
    spec, layers = operations.spec, len(operations.blocks)
    whole = sum(block_parts(operations).values())
    size = min(spec.checkpoint_blocks, layers)  # blocks that are recomputed together
    inputs = math.ceil(layers / size) * operations.stream_bytes
    ends = sum(end_parts(operations).values())
    if spec.checkpointing == "none":
        return KeptBytes(layers * whole, ends, 0.0)
    if spec.checkpointing == "selective":
        costly = sum(product_parts(operations).values())
        return KeptBytes(inputs + layers * costly, ends, size * max(0.0, whole - costly))
    if spec.checkpointing == "feed-forward":  # recomputes each block separately
        costly = sum(attention_parts(operations).values())
        inputs = layers * operations.stream_bytes
        return KeptBytes(inputs + layers * costly, ends, max(0.0, whole - costly))
    if spec.checkpointing == "nested":
        return KeptBytes(inputs, ends, size * operations.stream_bytes + whole)
    return KeptBytes(inputs, ends, size * whole)


def kept_without_checkpoints(operations: StepOperations) -> float:
    """Returns what autograd keeps of one micro-batch if nothing is recomputed."""
    blocks = len(operations.blocks) * sum(block_parts(operations).values())
    return blocks + sum(end_parts(operations).values())


def block_parts(operations: StepOperations) -> Parts:
    """Returns everything that autograd keeps of a block without checkpointing.

    Compiled, the activation of the feed-forward layer is recomputed, as the peaks of five compiled rows
    show (docs/log/2026-11-22-predictions.md). Rotated queries and keys are then kept instead of the
    product before them, unless a checkpoint keeps that. A block compiled by itself computes its second
    norm's input again, from its own input and attention's output layer, which is smaller under autocast
    (docs/log/2026-11-29-long-attention.md).
    """
    model, arithmetic = operations.model, operations.arithmetic
    m, itemsize, f = operations.tokens, arithmetic.activation_bytes, operations.feed_forward_width
    heads = operations.share.batch * model.num_heads // operations.share.tensor
    # with overlap, backward gathers the inputs again
    input_tokens = operations.own_tokens if operations.overlapped else m
    second_norm_input = operations.stream_bytes
    if model.block == "parallel":  # both norms read the block's input
        second_norm_input = 0.0
    elif model.block == "pre-norm" and operations.spec.compile == "blocks":
        second_norm_input = operations.own_tokens * model.d_model * itemsize
    parts = {
        "norm inputs": operations.stream_bytes + second_norm_input,
        "norm statistics": 2 * operations.own_tokens * STATISTIC,
        "inputs of column layers": 2 * input_tokens * model.d_model * itemsize,
        "queries, keys and values": m * operations.qkv_rows * itemsize,
        "attention output": m * operations.attention_width * itemsize,
        "attention statistics": heads * operations.length * STATISTIC,
        "feed-forward up": m * operations.up_rows * itemsize,
        "feed-forward activation": _num_kept_after_up(model, arithmetic) * m * f * itemsize,
    }
    if operations.share.ulysses:  # attention keeps its own heads, the layer after it all heads
        parts["exchanged attention output"] = parts["attention output"]
    if model.positions == "rope" and _keeps_before_rotation(operations):
        parts["rotated queries and keys"] = m * operations.rotated_width * itemsize
    if arithmetic.casts:
        parts["bf16 copies of weights"] = weight_copy_bytes(operations)
    return parts


def _keeps_before_rotation(operations: StepOperations) -> bool:
    """True if queries and keys are kept both before and after their rotation.

    If heads are exchanged, attention keeps the rotated ones of its heads, and nothing keeps the product.
    """
    if operations.spec.checkpointing in ("selective", "feed-forward") or operations.model.qk_norm:
        return True
    return not (operations.arithmetic.is_compiled or operations.share.ulysses)


def _num_kept_after_up(model: ModelSpec, arithmetic: Arithmetic) -> int:
    """Returns how many tensors of shape (M, F) are kept after the up projection."""
    if model.gate == "quack":
        return 0
    return 2 if model.is_gated and not arithmetic.is_compiled else 1


def weight_copy_bytes(operations: StepOperations) -> float:
    """Returns the bytes of a block's weights in bf16, which autocast keeps until forward ends."""
    casts = operations.arithmetic.casts
    return sum(operations.block_matrices) * operations.arithmetic.activation_bytes if casts else 0.0


def product_parts(operations: StepOperations) -> Parts:
    """Returns what selective checkpointing keeps of a block (models/checkpointing.py).

    These are results of products, attention and communication. Compiled, the output of the feed-forward
    layer is not kept, because backward does not need it.
    """
    parts = attention_parts(operations)
    parts["feed-forward up"] = block_parts(operations)["feed-forward up"]
    if not operations.arithmetic.is_compiled:
        if operations.model.gate == "quack":  # the product returns it as well
            parts["feed-forward activation"] = parts["feed-forward up"] / 2
        parts |= {f"feed-forward {name}": n for name, n in _row_layer_parts(operations).items()}
    return parts


def attention_parts(operations: StepOperations) -> Parts:
    """Returns what feed-forward checkpointing keeps of a block: attention and its two products."""
    whole = block_parts(operations)
    names = "queries, keys and values", "attention output", "attention statistics"
    parts = {name: whole[name] for name in names} | _row_layer_parts(operations)
    if operations.share.ulysses:  # what other ranks sent, without the rank's own part
        of_others = 1 - 1 / operations.share.context
        parts["exchanged heads"] = of_others * sum(whole[name] for name in names[:2])
    return parts


def _row_layer_parts(operations: StepOperations) -> Parts:
    """Returns the output of a row layer and, with tensor parallelism, this rank's piece of the sum over
    ranks. Compiled, only the piece is kept then, because backward needs nothing else; with overlap, one
    operator computes both and returns only the piece.
    """
    token_bytes = operations.model.d_model * operations.arithmetic.activation_bytes
    output: Parts = {"output of row layer": operations.tokens * token_bytes}
    if operations.share.tensor == 1:
        return output
    piece: Parts = {"pieces of output of row layer": operations.own_tokens * token_bytes}
    keeps_piece_only = operations.overlapped or operations.arithmetic.is_compiled
    return piece if keeps_piece_only else output | piece


def end_parts(operations: StepOperations) -> Parts:
    """Returns what last norm, head and loss keep, if the stage has them."""
    if not operations.is_last:
        return {}
    model, arithmetic = operations.model, operations.arithmetic
    m, d, v = operations.tokens, model.d_model, model.vocab_size // operations.share.tensor
    parts = {
        "last norm": operations.stream_bytes + operations.own_tokens * STATISTIC,
        "input of the head": m * d * arithmetic.activation_bytes,
    }
    if fused := operations.fused_loss:
        return parts | fused.kept
    # Compiled, and if ranks have parts of the vocabulary, the logits are kept instead.
    parts["log-softmax"] = m * v * arithmetic.activation_bytes
    if operations.autocasts_loss and operations.share.tensor == 1:
        parts["log-softmax in fp32"] = m * v * 4
    if arithmetic.casts:
        parts["bf16 copy of the head"] = v * d * arithmetic.activation_bytes
    return parts


def loss_bytes(operations: StepOperations) -> float:
    """Returns the most that the loss holds in addition to what is kept.

    That is the gradient of the logits in its backward, or what the fused loss holds.
    """
    if not operations.is_last:
        return 0.0
    if fused := operations.fused_loss:
        return fused.most_bytes
    m, v = operations.tokens, operations.model.vocab_size // operations.share.tensor
    itemsize = operations.arithmetic.activation_bytes
    if operations.compiles_ends:  # the gradient overwrites the logits
        return 0.0
    if operations.share.tensor > 1:
        return max(m * v * itemsize, loss_forward_bytes(operations))
    return m * v * (4 if itemsize == 2 else 8)


def loss_forward_bytes(operations: StepOperations) -> float:
    """Returns what the loss holds in addition at the end of forward."""
    if not operations.is_last:
        return 0.0
    if fused := operations.fused_loss:
        return fused.forward_bytes
    if operations.share.tensor == 1:  # bf16 logits, half as large as their gradients
        return loss_bytes(operations) / 2
    m, v = operations.tokens, operations.model.vocab_size // operations.share.tensor
    # log_softmax in fp32, and from bf16 also the copy that it reads
    copied = 8 if operations.arithmetic.activation_bytes == 2 else 4
    # A local variable of parallel/tensor_parallel/layers.py holds the last norm's output.
    return min(m * v, MOST_COPIED_LOGITS) * copied + operations.stream_bytes


def block_backward_bytes(operations: StepOperations) -> float:
    """Returns the bytes of the gradients of a block's widest activations, while its backward runs."""
    model, n = operations.model, operations.share.tensor
    widest = (3 if model.is_gated else 2) * model.d_ff // n + model.d_model
    return operations.tokens * widest * operations.arithmetic.activation_bytes
