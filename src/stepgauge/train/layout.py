"""Builds a preset's training step under a layout, distributed over ranks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.cost.pipeline.cuts import blocks_of
from stepgauge.kernels.attention import partial as attention
from stepgauge.kernels.linear_cross_entropy import partial as linear_cross_entropy
from stepgauge.kernels.part_sum import part_sum
from stepgauge.models.bert import NOT_MASKED
from stepgauge.models.transformer import Attention, compiled
from stepgauge.parallel.communication.peer_memory import copies_reach
from stepgauge.parallel.context_parallel.head_exchange import HeadExchange
from stepgauge.parallel.context_parallel.ring_attention import PartialAttention, RingAttention
from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.parallel.counted_mean import CountedMean
from stepgauge.parallel.layout import Network, mesh_of, require_one_layout, spread
from stepgauge.parallel.pipeline import Tie
from stepgauge.parallel.replicas import device_of
from stepgauge.parallel.tensor_parallel.by_torch import parallelize_by_torch
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.parallel.training import Parallel, Parallelise
from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.plan.stages import BY_TIMES, num_parts, parts_of
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.train.build import (
    NETWORKS,
    batch_for,
    blocks_runner,
    build_step,
    optimizer_of,
)
from stepgauge.train.part_times import part_times
from stepgauge.train.precision import PRECISIONS, REDUCE_DTYPES, Precision, precision_on
from stepgauge.train.step import TrainingStep

Spec = LayoutSpec | TrainSpec
Preset = ModelSpec | BertSpec
FUSED_ATTENTION = PartialAttention(attention.partial_forward, attention.partial_backward)
FUSED_LOSS = PartialLoss(
    linear_cross_entropy.partial_forward, linear_cross_entropy.partial_backward
)


def build_layout_step(
    spec: Spec,
    *,
    layout: Layout,
    device: torch.device,
    max_gradient_norm: float | None = None,
    recording: bool = False,
    stages: Sequence[range] | None = None,
    recompute: RecomputePlan | None = None,
    **optimizer_settings: Any,
) -> TrainingStep:
    """Returns this rank's part of the step. All ranks must call it.

    stages     the blocks of each pipeline stage; by default those of `stages_of`
    recompute  with a data axis only: what backward recomputes, instead of the spec's checkpointing

    Raises ValueError for an unsupported precision, and if the ranks have different layouts.
    """
    if layout.context == layout.tensor == layout.pipeline == 1:  # any wrapper, including torch's
        if layout.ranks > 1:
            require_one_layout(layout)
        return build_step(
            dataclasses.replace(spec, device=str(device)),
            max_gradient_norm=max_gradient_norm,
            parallelise=weighted_by_targets(on_data_axis(spec, layout), layout),
            recompute=recompute,
            **optimizer_settings,
        )
    precision = precision_on(spec.precision, device)
    parallel = _spread(
        spec, layout, device, precision, recording=recording, stages=stages, **optimizer_settings
    )
    return TrainingStep(
        parallel.module,
        parallel.optimizer,
        precision,
        device,
        max_gradient_norm=max_gradient_norm,
        parallel=parallel,
    )


def _by_torch(
    spec: Spec,
    layout: Layout,
    device: torch.device,
    precision: Precision,
    **optimizer_settings: Any,
) -> Parallel:
    """Returns the network under torch's own tensor parallelism, with its optimizer."""
    model = spec.network
    module = _build(spec, layout, device, model, range(model.num_layers))
    parallelize_by_torch(module, table_of(model), mesh_of(layout, device.type)["tensor"])
    groups, optimizer = optimizer_of(spec.optimizer, precision, **optimizer_settings)
    return Parallel(module=module, optimizer=optimizer(groups(module)))


def _spread(
    spec: Spec,
    layout: Layout,
    device: torch.device,
    precision: Precision,
    *,
    recording: bool,
    stages: Sequence[range] | None,
    **optimizer_settings: Any,
) -> Parallel:
    """Returns this rank's part of the network, with its optimizer."""
    if layout.torch_tensor:
        return _by_torch(spec, layout, device, precision, **optimizer_settings)
    groups, optimizer = optimizer_of(spec.optimizer, precision, **optimizer_settings)
    return spread(
        layout,
        network_of(spec, layout, device, stages or stages_of(spec, layout, device)),
        groups,
        optimizer,
        settings=wrapper_settings(spec, layout.wrapper),
        device=device,
        recording=recording,
    )


def on_data_axis(spec: Spec, layout: Layout) -> Parallelise:
    """Returns the wrapper of a layout that has only a data axis."""
    settings = wrapper_settings(spec, layout.wrapper)
    return functools.partial(parallelise, layout.wrapper, settings=settings)


def weighted_by_targets(wrap: Parallelise, layout: Layout) -> Parallelise:
    """Returns the wrapper with each rank's loss weighted by its number of targets."""
    if layout.data == 1:
        return wrap
    mean = CountedMean(num_counted, dist.group.WORLD)

    def weight(batch: Sequence[Any]) -> Tensor:
        return mean.weights([batch[1:2]], batch[1].device)[0]

    def counted(module: nn.Module, *others: Any) -> Parallel:
        return dataclasses.replace(wrap(module, *others), weight=weight)

    return counted


def wrapper_settings(spec: Spec | DataParallelSpec, wrapper: str) -> Settings:
    """Returns the wrapper's settings from the spec."""
    sharded = WRAPPERS[wrapper].shards("weights")
    return Settings(
        bucket_mb=spec.bucket_mb,
        compute_dtype=PRECISIONS[spec.precision].autocast if sharded else None,
        reduce_dtype=REDUCE_DTYPES[spec.reduce_dtype],
    )


def stages_of(spec: Spec, layout: Layout, device: torch.device) -> list[range]:
    """Returns the blocks of each pipeline stage, the same on all ranks.

    If the spec balances stages by time, the parts are timed here, and all ranks must call it.
    """
    model, precision = spec.network, PRECISIONS[spec.precision]
    if layout.pipeline == 1:
        return [range(model.num_layers)]
    times = None
    if spec.balance in BY_TIMES:
        with precision.matmul_mode():
            batch = batch_for(model, spec.batch // layout.data // layout.microbatches, seed=0)
            inputs, targets = _cut(model)([part.to(device) for part in batch])
            times = part_times(
                model,
                functools.partial(build_parts, spec, layout, device),
                inputs=tuple(inputs),
                targets=targets[0],
                device=device,
                context=lambda: precision.autocasting(device),
            )
    return blocks_of(spec, layout, times)


def _build(
    spec: Spec, layout: Layout, device: torch.device, model: Preset, blocks: range
) -> nn.Module:
    """Returns a stage, with weights drawn from the spec's seed."""
    return build_parts(spec, layout, device, model, parts_of(blocks, model.num_layers))


def build_parts(
    spec: Spec | WorkSpec, layout: Layout, device: torch.device, model: Preset, parts: range
) -> nn.Module:
    """Returns parts of the network, as spec.plan.stages numbers them."""
    make, _ = NETWORKS[type(model)]
    part = make(model, device=device, parts=parts, seed=spec.seed)
    part.through_blocks = blocks_runner(spec, None)
    is_cut = 0 in parts and num_parts(model.num_layers) - 1 not in parts
    if isinstance(model, BertSpec) and is_cut:
        part.register_forward_pre_hook(_types_last)
    return compiled(part.to(PRECISIONS[spec.precision].parameters), spec.compile)


def network_of(
    spec: Spec, layout: Layout, device: torch.device, stages: Sequence[range]
) -> Network:
    """Returns a spec's network, cut into stages, in the form that `spread` distributes."""
    model, precision = spec.network, PRECISIONS[spec.precision]
    schedule = schedule_of(layout) if layout.pipeline > 1 else None

    def context() -> contextlib.AbstractContextManager[Any]:
        return precision.autocasting(device)

    return Network(
        build=lambda stage: _build(spec, layout, device, model, stages[stage]),
        table=lambda stage: table_of(model, stages[stage]),
        schedule=schedule,
        tied=_tied(model, len(stages)),
        cut=_cut(model),
        count=num_counted,
        context=context,
        graphs=CudaGraphs(device) if isinstance(spec, LayoutSpec) and spec.cuda_graphs else None,
        cut_sequences=functools.partial(cut_sequences, layout=layout),
        partial_loss=partial_loss_of(model),
        part_sum=part_sum,
    )


def partial_loss_of(model: Preset) -> PartialLoss | None:
    """Returns the kernels of a loss whose vocabulary is split over ranks; None for torch's loss."""
    return FUSED_LOSS if isinstance(model, ModelSpec) and model.loss == "fused" else None


def stage_batch(
    model: Preset, parts: range, batch: Sequence[Any], hidden: Callable[[], Tensor]
) -> Sequence[Any]:
    """Returns the arguments of a stage with these parts for a batch. `hidden` makes the activations
    that it would receive from the stage before.
    """
    last = num_parts(model.num_layers) - 1
    if 0 in parts and last in parts:
        return batch
    inputs, targets = _cut(model)(batch)
    return [*(inputs if 0 in parts else [hidden()]), *(targets if last in parts else ())]


def cut_sequences(module: nn.Module, group: dist.ProcessGroup, *, layout: Layout) -> SplitSequences:
    """Makes the Transformer, or a stage of it, compute only this rank's tokens of whole sequences,
    and their mean loss. Attention exchanges heads or passes keys around the group.

    Between stages only this rank's tokens are sent; with a tensor axis, its part of them.
    """
    context: HeadExchange | RingAttention = RingAttention(group, FUSED_ATTENTION)
    if layout.ulysses:
        context = HeadExchange(group, by_copies=copies_reach(group, device_of(module)))
    for part in module.modules():
        if not isinstance(part, Attention):
            continue
        if isinstance(context, HeadExchange):
            part.attend = functools.partial(context.attend, part.attend)
        else:
            part.attend = functools.partial(context.attend, is_causal=part.is_causal)

    def select_tokens(
        _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Selects this rank's tokens and targets. The input of a stage without the embedding is
        already this rank's.
        """
        first, *targets = inputs
        has_embedding = module.embedding is not None
        length = (
            first.shape[1] if has_embedding else first.shape[1] * layout.context * layout.tensor
        )
        positions_T = context.positions(length, first.device)
        own_targets = [target.index_select(1, positions_T) for target in targets]
        if has_embedding:
            first = first.index_select(1, positions_T)
        return (first, *own_targets), {**named, "positions_T": positions_T}

    module.register_forward_pre_hook(select_tokens, with_kwargs=True)
    return context


def _tied(model: ModelSpec | BertSpec, stages: int) -> list[Tie]:
    """Returns the embedding and the output matrix if they are one weight in two stages."""
    if stages == 1 or (isinstance(model, ModelSpec) and not model.tied_head):
        return []
    embedding = "tokens.weight" if isinstance(model, BertSpec) else "embedding.weight"
    return [((0, embedding), (stages - 1, "head.weight"))]


def _cut(model: Preset) -> Callable[[Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]:
    """Returns a function that splits a batch into the inputs of the first stage, which for BERT
    include the types, and the targets of the last stage.
    """
    if isinstance(model, BertSpec):
        return lambda batch: ((batch[0], batch[2]), batch[1:2])
    return lambda batch: (batch[:1], batch[1:])


def _types_last(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Returns the arguments in BERT's order: tokens, targets, types."""
    tokens, types = inputs
    return tokens, None, types


def num_counted(targets_BT: Tensor) -> Tensor:
    """Returns how many targets each sequence has."""
    return (targets_BT != NOT_MASKED).sum(1)
