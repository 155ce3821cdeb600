"""Activation checkpointing: backward computes again what forward then need not keep (Chen et al.
2016).

Legend: B batch, T sequence, D model width. A block is called as block(x_BTD, rotation).
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


def _costly() -> frozenset[Any]:
    """Operators whose results selective checkpointing keeps: matrix products and attention."""
    aten = torch.ops.aten
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
            torch.ops.stepgauge.flash_attention.default,
        )
    )


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if operator in _costly() else CheckpointPolicy.PREFER_RECOMPUTE
    )


def by_plan(blocks: Blocks, x_BTD: Tensor, rotation: Any, *, plan: RecomputePlan) -> Tensor:
    """Each block as the plan says."""
    for layer, block in enumerate(blocks):
        x_BTD = through_blocks(plan.of(layer), 1)([block], x_BTD, rotation)
    return x_BTD


def through_blocks(checkpointing: str, size: int) -> Through:
    """How the model goes through its blocks, by a name of CHECKPOINTING; `size` blocks are computed
    again together.

    nested computes them again one by one: of the part only the blocks' inputs are held, for a third
    forward.
    """
    if checkpointing == "none":
        return in_order
    if checkpointing == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return functools.partial(in_parts, size=size, through=in_order, context_fn=contexts)
    inner = (
        functools.partial(in_parts, size=1, through=in_order)
        if checkpointing == "nested"
        else in_order
    )
    return functools.partial(in_parts, size=size, through=inner)
