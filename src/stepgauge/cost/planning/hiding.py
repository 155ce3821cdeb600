"""Evaluates overlap_ratios.py at the rates that a layout's block and its wires reach."""

from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.supported import require_priced
from stepgauge.cost.planning import overlap_ratios
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.layout_step import LayoutSpec


def scales(spec: LayoutSpec) -> dict[str, float]:
    """Returns orders of magnitude for a rank's micro-batch in the whole network."""
    model = require_priced(spec)  # type: ignore[arg-type]
    return overlap_ratios.typical_scales(
        tokens=spec.micro_batch * model.context_length,
        width=model.d_model,
        blocks=model.num_layers,
        block_weights=model.block_matrix_parameters,
        vocabulary=model.vocab_size,
    )


def overlaps(spec: LayoutSpec, machine: CalibratedMachine) -> list[overlap_ratios.OverlapRatio]:
    """Returns the ratio of communication to computation for each axis of the layout.

    Raises ValueError for what is not modelled.
    """
    parts = LayoutParts.of(spec, machine)
    stage, prices = parts.stages[0], parts.prices
    assert isinstance(stage, StepOperations), "nothing was traced"
    block_us = prices.total_us(term for term in stage.forward_parts()[1] if not term.axis)
    weights = stage.model.block_matrix_parameters / spec.parsed_layout.tensor
    flops_per_s = 2 * stage.tokens * weights / block_us * 1e6
    ratios: list[overlap_ratios.OverlapRatio] = []
    if spec.parsed_layout.tensor > 1:
        ratios.append(_tensor(stage, prices, flops_per_s))
    if spec.parsed_layout.num_replicas > 1:
        ratios += _data(spec, stage, prices, flops_per_s)
    if spec.parsed_layout.pipeline > 1:
        ratios.append(_pipeline(stage, prices, flops_per_s))
    return ratios


def _sent_per_s(
    prices: Prices, operation: str, nbytes: float, axis: str, *, sends: int = 1,
    by_copies: bool = False,
) -> float:  # fmt: skip
    """Returns the bytes per second that a rank sends, in a ring or, where it can, by copies."""
    copied = prices.by_copies(operation, nbytes, axis) if by_copies else None
    us = (copied or prices.collective(operation, nbytes, axis)).us
    ranks = prices.axes[axis].ranks
    return sends * nbytes * (ranks - 1) / ranks / us * 1e6


def _tensor(
    stage: StepOperations, prices: Prices, flops_per_s: float
) -> overlap_ratios.OverlapRatio:
    width, itemsize = stage.model.d_model, stage.arithmetic.activation_bytes
    stream = stage.tokens * width * itemsize
    return overlap_ratios.tensor(
        ranks=stage.share.tensor, width=width, value_bytes=itemsize, flops_per_s=flops_per_s,
        block_weights=stage.model.block_matrix_parameters,
        bytes_per_s=_sent_per_s(prices, "all_gather", stream, "tensor", by_copies=stage.overlapped),
        waits=not stage.overlapped,
    )  # fmt: skip


def _data(
    spec: LayoutSpec, stage: StepOperations, prices: Prices, flops_per_s: float
) -> list[overlap_ratios.OverlapRatio]:
    """Returns the ratios of both directions for ZeRO 3, and that of gradients for other wrappers."""
    ranks = spec.parsed_layout.num_replicas
    if WRAPPERS[spec.parsed_layout.wrapper].shards("weights"):
        itemsize = stage.arithmetic.activation_bytes
        unit = stage.model.block_matrix_parameters / stage.share.tensor * itemsize
        return list(overlap_ratios.sharded(
            ranks=ranks, tokens=stage.tokens, weight_bytes=itemsize, flops_per_s=flops_per_s,
            bytes_per_s=_sent_per_s(prices, "all_gather", unit, "data"),
        ))  # fmt: skip
    bucket = spec.bucket_mb * 1e6
    return [overlap_ratios.data_parallel(
        ranks=ranks, tokens=stage.tokens, gradient_bytes=stage.arithmetic.weight_bytes, flops_per_s=flops_per_s,
        bytes_per_s=_sent_per_s(prices, "all_reduce", bucket, "data", sends=2),
    )]  # fmt: skip


def _pipeline(
    stage: StepOperations, prices: Prices, flops_per_s: float
) -> overlap_ratios.OverlapRatio:
    model, itemsize, tensor = stage.model, stage.arithmetic.residual_bytes, stage.share.tensor
    piece = stage.own_tokens * model.d_model * itemsize
    return overlap_ratios.pipeline(
        blocks=len(stage.blocks), width=model.d_model / tensor, value_bytes=itemsize,
        block_weights=model.block_matrix_parameters / tensor, flops_per_s=flops_per_s,
        bytes_per_s=piece / prices.transfer(piece).us * 1e6,
    )  # fmt: skip
