"""The formulas of overlap_ratios.py at the rates that a layout's block and its wires reach."""

from stepgauge.cost.layout import LayoutParts
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.supported import require_priced
from stepgauge.cost.planning import overlap_ratios
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.layout_step import LayoutSpec


def scales(spec: LayoutSpec) -> dict[str, float]:
    """Orders of magnitude of a rank's micro-batch in the whole network."""
    model = require_priced(spec)  # type: ignore[arg-type]
    return overlap_ratios.typical_scales(
        tokens=spec.micro_batch * model.context_length,
        width=model.d_model,
        blocks=model.num_layers,
        block_weights=model.block_matrix_parameters,
        vocabulary=model.vocab_size,
    )


def overlaps(spec: LayoutSpec, machine: CalibratedMachine) -> list[overlap_ratios.OverlapRatio]:
    """Each axis of the layout against what could hide it. Raises ValueError for what is not
    modelled.
    """
    parts = LayoutParts.of(spec, machine)
    stage, prices = parts.stages[0], parts.prices
    assert isinstance(stage, StepOperations), "nothing was traced"
    computing = prices.total_us(term for term in stage.forward_parts()[1] if not term.axis)
    weights = stage.model.block_matrix_parameters / spec.parsed_layout.tensor
    rate = 2 * stage.tokens * weights / computing * 1e6
    found: list[overlap_ratios.OverlapRatio] = []
    if spec.parsed_layout.tensor > 1:
        found.append(_tensor(stage, prices, rate))
    if spec.parsed_layout.num_replicas > 1:
        found += _data(spec, stage, prices, rate)
    if spec.parsed_layout.pipeline > 1:
        found.append(_pipeline(stage, prices, rate))
    return found


def _sent_per_s(
    prices: Prices, operation: str, nbytes: float, axis: str, *, sends: int = 1
) -> float:
    """Bytes that a rank of a ring sends in a second."""
    ranks, us = prices.axes[axis].ranks, prices.collective(operation, nbytes, axis).us
    return sends * nbytes * (ranks - 1) / ranks / us * 1e6


def _tensor(stage: StepOperations, prices: Prices, rate: float) -> overlap_ratios.OverlapRatio:
    width, itemsize = stage.model.d_model, stage.arithmetic.activation_bytes
    stream = stage.tokens * width * itemsize
    return overlap_ratios.tensor(
        ranks=stage.share.tensor, width=width, value_bytes=itemsize, flops_per_s=rate,
        block_weights=stage.model.block_matrix_parameters,
        bytes_per_s=_sent_per_s(prices, "all_gather", stream, "tensor"),
        waits=not stage.overlapped,
    )  # fmt: skip


def _data(
    spec: LayoutSpec, stage: StepOperations, prices: Prices, rate: float
) -> list[overlap_ratios.OverlapRatio]:
    """Of ZeRO 3 both directions, else gradients in buckets."""
    ranks = spec.parsed_layout.num_replicas
    if WRAPPERS[spec.parsed_layout.wrapper].shards("weights"):
        itemsize = stage.arithmetic.activation_bytes
        unit = stage.model.block_matrix_parameters / stage.share.tensor * itemsize
        return list(overlap_ratios.sharded(
            ranks=ranks, tokens=stage.tokens, weight_bytes=itemsize, flops_per_s=rate,
            bytes_per_s=_sent_per_s(prices, "all_gather", unit, "data"),
        ))  # fmt: skip
    bucket = spec.bucket_mb * 1e6
    return [overlap_ratios.data_parallel(
        ranks=ranks, tokens=stage.tokens, gradient_bytes=stage.arithmetic.weight_bytes, flops_per_s=rate,
        bytes_per_s=_sent_per_s(prices, "all_reduce", bucket, "data", sends=2),
    )]  # fmt: skip


def _pipeline(stage: StepOperations, prices: Prices, rate: float) -> overlap_ratios.OverlapRatio:
    model, itemsize, tensor = stage.model, stage.arithmetic.residual_bytes, stage.share.tensor
    piece = stage.own_tokens * model.d_model * itemsize
    return overlap_ratios.pipeline(
        blocks=len(stage.blocks), width=model.d_model / tensor, value_bytes=itemsize,
        block_weights=model.block_matrix_parameters / tensor, flops_per_s=rate,
        bytes_per_s=piece / prices.transfer(piece).us * 1e6,
    )  # fmt: skip
