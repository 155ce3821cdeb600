"""Activation checkpointing: backward computes again what forward then need not keep (Chen et al.
2016).

Legend: B batch, T sequence, D model width. A block is called as block(x_BTD, rotation), and as
block(x_BTD, rotation, checkpointing) where it is to checkpoint itself by a name of KEPT.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stepgauge.spec.plan.recompute import RecomputePlan

Blocks = Iterable[nn.Module]
Through = Callable[[Blocks, Tensor, Any], Tensor]


def in_order(blocks: Blocks, x_BTD: Tensor, rotation: Any) -> Tensor:
    """One block after the other; autograd keeps what it wants."""
    for block in blocks:
        x_BTD = block(x_BTD, rotation)
    return x_BTD


def in_parts(
    blocks: Blocks, x_BTD: Tensor, rotation: Any, *, size: int, through: Through, **settings: Any
) -> Tensor:
    """Keeps only the input of every `size` blocks; backward runs them again, `through` them."""
    for part in _parts(list(blocks), size):
        # The model draws no random numbers: there is no state to keep for the second time.
        x_BTD = checkpoint(
            through,
            part,
            x_BTD,
            rotation,
            use_reentrant=False,
            preserve_rng_state=False,
            **settings,
        )
    return x_BTD


def _parts(blocks: list[nn.Module], size: int) -> Iterator[list[nn.Module]]:
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]


# Operators whose results selective checkpointing keeps. Those of stepgauge, but for
# flash_attention and gated_product (kernels/), are of networks that are spread over ranks:
# overlapped.py and ring_attention.py of parallel/.
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
# What ranks send each other within a block (residual_stream.py of parallel/). Not what they
# gather before a product, which is as large as all of them have together.
SENT = frozenset(
    (
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    )
)
COSTLY = PRODUCTS | ATTENTION | SENT


def _is_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy(operator.name() in COSTLY)


def _policy(is_kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _UntilAttentionEnds:
    """A policy that keeps a block's costly results up to the product that follows attention: an
    operator of ATTENTION or, written out, its batched products.
    """

    def __init__(self) -> None:
        # forward and its second time ask separately
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


# Functions of a module, which is what compilers take.
def _costly_results() -> Any:
    return create_selective_checkpoint_contexts(_is_costly)


def _until_attention_ends() -> Any:
    return create_selective_checkpoint_contexts(_UntilAttentionEnds())


KEPT = {"selective": _costly_results, "feed-forward": _until_attention_ends}


def keeping(checkpointing: str, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """compute(*inputs) of one block, of which that checkpointing keeps only what KEPT says."""
    return checkpoint(
        compute,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=KEPT[checkpointing],
    )


def within_blocks(blocks: Blocks, x_BTD: Tensor, rotation: Any, *, checkpointing: str) -> Tensor:
    """Each block checkpoints itself: also where it is compiled alone, and nobody else sees what is
    in it.
    """
    for block in blocks:
        x_BTD = block(x_BTD, rotation, checkpointing)
    return x_BTD


def by_plan(
    blocks: Blocks, x_BTD: Tensor, rotation: Any, *, plan: RecomputePlan, alone: bool
) -> Tensor:
    """Each block as the plan says."""
    for layer, block in enumerate(blocks):
        x_BTD = through_blocks(plan.of(layer), 1, alone=alone)([block], x_BTD, rotation)
    return x_BTD


def through_blocks(checkpointing: str, size: int, *, alone: bool) -> Through:
    """How the model goes through its blocks, by a name of CHECKPOINTING; `size` blocks are computed
    again together. `alone`: each block is compiled by itself.

    nested computes them again one by one: of the part only the blocks' inputs are held, for a third
    forward.
    """
    if checkpointing == "none":
        return in_order
    if checkpointing == "feed-forward" or (checkpointing == "selective" and alone):
        return functools.partial(within_blocks, checkpointing=checkpointing)
    if checkpointing == "selective":
        return functools.partial(in_parts, size=size, through=in_order, context_fn=_costly_results)
    inner = (
        functools.partial(in_parts, size=1, through=in_order)
        if checkpointing == "nested"
        else in_order
    )
    return functools.partial(in_parts, size=size, through=inner)
