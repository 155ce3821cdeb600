"""Activation checkpointing: backward computes again what forward then need not keep (Chen et al.
2016).

Legend: B batch, T sequence, D model width. A block is called as block(x_BTD, rotation), and as
block(x_BTD, rotation, checkpointing) where it is to checkpoint itself by a name of KEPT.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
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


BESIDE_PRODUCTS = ("column_forward", "row_forward")  # parallel.overlapped


def _costly() -> frozenset[Any]:
    """Operators whose results selective checkpointing keeps: matrix products, also those with what
    ranks send beside them, which are defined once there are such, and attention.
    """
    aten, own = torch.ops.aten, torch.ops.stepgauge
    beside = [getattr(own, name).default for name in BESIDE_PRODUCTS if hasattr(own, name)]
    return frozenset(
        (
            aten.mm.default,
            aten.bmm.default,
            aten.addmm.default,
            aten.baddbmm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            own.flash_attention.default,
            *beside,
        )
    )


def _is_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _costly()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _UntilAttentionEnds:
    """A policy that keeps a block's costly results up to the product that follows attention: an
    operator of that name or, written out, its batched products.
    """

    def __init__(self) -> None:
        # forward and its second time ask separately
        self.products_after: dict[bool, int | None] = {False: None, True: None}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in _costly():
            return CheckpointPolicy.PREFER_RECOMPUTE
        after = self.products_after[context.is_recompute]
        if "attention" in operator.name() or "bmm" in operator.name():
            after = 0
        elif after is not None:
            after += 1
        self.products_after[context.is_recompute] = after
        kept = after is None or after <= 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


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
