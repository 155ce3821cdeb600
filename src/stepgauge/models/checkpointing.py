"""Activation checkpointing: forward keeps less, and backward recomputes it (Chen et al. 2016).

Legend: B batch, T sequence, D model width. A block is called as block(x_BTD, rotation). If it
checkpoints itself, it is called as block(x_BTD, rotation, checkpointing) with a name in CONTEXTS.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stepgauge.spec.plan.recompute import RecomputePlan

Blocks = Iterable[nn.Module]
Through = Callable[[Blocks, Tensor, Any], Tensor]  # runs blocks


def in_order(blocks: Blocks, x_BTD: Tensor, rotation: Any) -> Tensor:
    """Runs the blocks without checkpointing."""
    for block in blocks:
        x_BTD = block(x_BTD, rotation)
    return x_BTD


def in_parts(
    blocks: Blocks, x_BTD: Tensor, rotation: Any, *, size: int, through: Through, **settings: Any
) -> Tensor:
    """Keeps only the input of every part of `size` blocks. Backward recomputes the part.

    through  runs the blocks of a part
    """
    blocks = list(blocks)
    for start in range(0, len(blocks), size):
        # The model draws no random numbers, so the generator's state need not be kept.
        x_BTD = checkpoint(
            through,
            blocks[start : start + size],
            x_BTD,
            rotation,
            use_reentrant=False,
            preserve_rng_state=False,
            **settings,
        )
    return x_BTD


# Operators whose results selective checkpointing keeps. Those named stepgauge::, except
# flash_attention and gated_product (kernels/), are used only with several ranks (parallel/).
PRODUCTS = frozenset(
    (
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "stepgauge::column_forward",
        "stepgauge::row_forward",
        "stepgauge::gated_product",
    )
)
ATTENTION = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "stepgauge::flash_attention",
        "stepgauge::ring_attention",
    )
)
# Collectives within a block (graph_collectives.py and copied_all_to_all.py in parallel/communication/).
# The all-gather before a product is not kept: its result is as large as the shards of all ranks
# together.
COLLECTIVES = frozenset(
    (
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
        "stepgauge::copied_all_to_all",
    )
)
COSTLY = PRODUCTS | ATTENTION | COLLECTIVES


def _is_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy(operator.name() in COSTLY)


def _policy(is_kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _UntilAttentionEnds:
    """A policy that keeps a block's costly results up to the first product after attention. Attention
    is an operator in ATTENTION, or the batched products of eager attention.
    """

    def __init__(self) -> None:
        # Number of products since attention, for the forward and for its recomputation.
        self.products_after: dict[bool, int | None] = {False: None, True: None}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name()
        if name not in COSTLY:
            return _policy(False)
        after = self.products_after[context.is_recompute]
        if name in ATTENTION or "bmm" in name:
            after = 0
        elif after is not None and name in PRODUCTS:
            after += 1
        self.products_after[context.is_recompute] = after
        return _policy(after is None or after <= 1)


# These are functions in a module, because compilers do not accept other callables.
def _costly_results() -> Any:
    return create_selective_checkpoint_contexts(_is_costly)


def _until_attention_ends() -> Any:
    return create_selective_checkpoint_contexts(_UntilAttentionEnds())


CONTEXTS = {"selective": _costly_results, "feed-forward": _until_attention_ends}


def checkpointed(checkpointing: str, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns compute(*inputs) of one block, of which only part of the results is kept.

    checkpointing  a name in CONTEXTS
    """
    return checkpoint(
        compute,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=CONTEXTS[checkpointing],
    )


def within_blocks(blocks: Blocks, x_BTD: Tensor, rotation: Any, *, checkpointing: str) -> Tensor:
    """Lets each block checkpoint itself. This also works for separately compiled blocks, whose
    operators cannot be seen from outside.
    """
    for block in blocks:
        x_BTD = block(x_BTD, rotation, checkpointing)
    return x_BTD


def by_plan(
    blocks: Blocks, x_BTD: Tensor, rotation: Any, *, plan: RecomputePlan, compiled_blocks: bool
) -> Tensor:
    """Checkpoints each block as in the plan.

    compiled_blocks  True if each block is compiled separately
    """
    for layer, block in enumerate(blocks):
        through = through_blocks(plan.of(layer), 1, compiled_blocks=compiled_blocks)
        x_BTD = through([block], x_BTD, rotation)
    return x_BTD


def through_blocks(checkpointing: str, size: int, *, compiled_blocks: bool) -> Through:
    """Returns the function that runs the blocks of a model with this kind of checkpointing.

    checkpointing    "nested" recomputes a part block by block, so that only the inputs of its blocks
                     are held; this costs a third forward
    size             number of blocks that are recomputed together
    compiled_blocks  True if each block is compiled separately
    """
    if checkpointing == "none":
        return in_order
    if checkpointing == "feed-forward" or (checkpointing == "selective" and compiled_blocks):
        return functools.partial(within_blocks, checkpointing=checkpointing)
    if checkpointing == "selective":
        return functools.partial(in_parts, size=size, through=in_order, context_fn=_costly_results)
    inner: Through = in_order
    if checkpointing == "nested":
        inner = functools.partial(in_parts, size=1, through=in_order)
    return functools.partial(in_parts, size=size, through=inner)
