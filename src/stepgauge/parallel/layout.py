"""Spreads a network over the axes of a Layout. `spread` shows the order in which they are applied:
pipeline stages, split sequences, split layers, and copies or shards of these on the data axis.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.parallel.counted_mean import Count, CountedMean, weighted
from stepgauge.parallel.data_axis import DataAxis, Settings, build_data_axis
from stepgauge.parallel.layout_state import LayoutState, require_distinct_names
from stepgauge.parallel.pipeline import Pipeline, Tie
from stepgauge.parallel.tensor_parallel import TensorParallel, parallelize_tensor
from stepgauge.parallel.tensor_parallel.exchange import PartSum, part_sum_by_torch
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.parallel.training import (
    Groups,
    OptimizerClass,
    Parallel,
    without_communication,
)
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.runtime.recording import Recorder
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.layout import Layout
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.tensor import Table, is_by_sequence, is_by_token
from stepgauge.spec.units import ceil_div

Batch = Sequence[Any]
WithoutAxis = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What a layout needs to know about a network.

    build     returns stage i on this rank's device; without a pipeline, stage 0 is the whole network,
              which is called with a batch and returns the loss
    table     returns the tensor parallel rules of a stage
    schedule  of the pipeline, over all stages; None without a pipeline
    tied      weights that two stages have
    cut       splits a batch into the inputs of the first stage and the targets, which the last stage
              takes after its inputs
    count     called with targets, returns how many of them the mean loss is over; None if that is the
              same for all batches
    context   entered around every forward of a pipeline, such as autocast
    graphs    records the stages of a pipeline (see Pipeline), or the step of a network whose layers
              are cut (see GraphedGradients)
    partial_loss, part_sum  for tensor parallelism: see parallelize_tensor
    cut_sequences  changes a stage that is called with whole sequences, so that it computes this
              rank's tokens, and its attention uses those of the whole group
    """

    build: Callable[[int], nn.Module]
    table: Callable[[int], Table] = lambda stage: {}
    schedule: Schedule | None = None
    tied: Sequence[Tie] = ()
    cut: Callable[[Batch], tuple[Batch, Batch]] = lambda batch: (batch[:1], batch[1:])
    count: Count | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    graphs: Recorder | None = None
    partial_loss: PartialLoss | None = None
    part_sum: PartSum = part_sum_by_torch
    cut_sequences: Callable[[nn.Module, dist.ProcessGroup], SplitSequences] | None = None

    @property
    def records_step(self) -> bool:
        """True if forward and backward are recorded as one graph."""
        return self.graphs is not None and self.schedule is None

    @property
    def tables(self) -> list[Table]:
        """The tables of all stages."""
        return [self.table(n) for n in range(self.schedule.num_stages if self.schedule else 1)]

    def cut_layers(
        self, stage: int, module: nn.Module, mesh: DeviceMesh, *, overlap: bool
    ) -> TensorParallel:
        """Cuts the layers of a stage, in place. If the table of one stage splits the residual stream, all
        stages do.
        """
        return parallelize_tensor(
            module,
            self.table(stage),
            group=mesh.get_group("tensor"),
            by_sequence=is_by_sequence(*self.tables),
            by_token=is_by_token(*self.tables),
            overlap=overlap,
            partial_loss=self.partial_loss,
            part_sum=self.part_sum,
        )

    def counted_mean(
        self, context: Sequence[SplitSequences], group: dist.ProcessGroup | None
    ) -> CountedMean | None:
        """Returns the mean loss over the targets that count on the ranks of the group. If sequences
        are split, a rank counts its own tokens of whole sequences.
        """
        count = self.count
        if count is None:
            return None
        if not context:
            return CountedMean(count, group)
        return CountedMean(lambda *targets: count(*map(context[0].piece, targets)), group)

    def pipeline(
        self,
        data: DataAxis,
        mean: CountedMean | None,
        mesh: DeviceMesh,
        device: torch.device,
        recording: bool,
    ) -> Pipeline:
        """Returns the pipeline of this rank's stages. It starts to reduce the gradients of a stage over
        the data axis after the stage's last backward.
        """
        assert self.schedule is not None, "a pipeline has a schedule"
        return Pipeline(
            data.modules.__getitem__,
            self.schedule,
            tied=_names_under_wrappers(self.tied, data),
            reduce=lambda stage, _: data.begin_reduction(stage),
            weights=data if data.is_sharded else None,
            share=mean,
            group=mesh.get_group("pipeline"),
            device=device,
            context=self.context,
            recording=recording,
            graphs=self.graphs,
        )


class DifferentLayoutsError(ValueError):
    """The ranks have different layouts, or a layout for another number of ranks."""


def spread(
    layout: Layout,
    network: Network,
    groups: Groups,
    optimizer: OptimizerClass,
    *,
    settings: Settings,
    device: torch.device,
    recording: bool = False,
) -> Parallel:
    """Spreads a network over the ranks of a layout and builds its optimizer. All ranks must call it.

    recording  records when the actions of a pipeline ran, for `Parallel.spans`

    Raises DifferentLayoutsError, on every rank; ValueError for a layout that the network does not
    support.
    """
    mesh = mesh_of(layout, device.type)
    _require_axes_supported(layout, network)
    stages = network.schedule.stages(mesh.get_local_rank("pipeline")) if network.schedule else [0]
    modules = {stage: network.build(stage) for stage in stages}
    pipeline_group = mesh.get_group("pipeline") if network.schedule else None
    require_distinct_names(modules, network.tied, pipeline_group)
    context: list[SplitSequences] = []
    if layout.context > 1:
        assert network.cut_sequences is not None, "_require_axes_supported has checked it"
        group = context_group(layout, device.type)
        context = [network.cut_sequences(module, group) for module in modules.values()]
    tensor = {
        stage: network.cut_layers(stage, module, mesh, overlap=layout.overlap)
        for stage, module in modules.items()
        if layout.tensor > 1
    }
    if layout.num_replicas > 1:
        settings = dataclasses.replace(settings, group=mesh.get_group("data"))
    mean = network.counted_mean(context, settings.group if layout.num_replicas > 1 else None)
    data = build_data_axis(layout.wrapper, modules, groups, optimizer, settings, tensor=tensor)
    pipeline = network.pipeline(data, mean, mesh, device, recording) if network.schedule else None
    return SpreadNetwork(network, data, context, tensor, mean, pipeline, mesh, device).parallel()


def _require_axes_supported(layout: Layout, network: Network) -> None:
    """Raises ValueError for an axis of the layout for which the network has no way to spread it."""
    missing = {
        "context": network.cut_sequences is None,
        "pipeline": network.schedule is None,
        "tensor": not any(network.tables),
    }
    needed = {"context": "cut_sequences", "pipeline": "schedule", "tensor": "table with rules"}
    for axis, name in needed.items():
        if axis in layout.sizes and missing[axis]:
            raise ValueError(f"layout {str(layout)!r} has a {axis} axis; the network has no {name}")


@dataclasses.dataclass(frozen=True)
class SpreadNetwork:
    """This rank's part of a network that `spread` has spread, axis by axis."""

    network: Network
    data: DataAxis
    context: Sequence[SplitSequences]
    tensor: Mapping[int, TensorParallel]
    mean: CountedMean | None
    pipeline: Pipeline | None
    mesh: DeviceMesh
    device: torch.device

    def parallel(self) -> Parallel:
        state = LayoutState(
            data=self.data,
            tensor=self.tensor,
            place={axis: self.mesh.get_local_rank(axis) for axis in self.axis_names},
            pipeline=self.mesh.get_group("pipeline") if self.pipeline else None,
            aliases={name: tie[0][1] for tie in self.network.tied for _, name in tie[1:]},
        )
        pipeline = self.pipeline
        everything = nn.ModuleList(self.data.modules.values())
        whole_step = self._forward_backward if pipeline else self._recorded_step()
        return Parallel(
            module=self.data.modules[0] if pipeline is None else everything,
            optimizer=self.data.optimizer,
            no_sync=self.data.no_sync,
            clip=self._clip,
            # communication is part of the graph
            without_axis={} if self.network.records_step else self._without_axis(),
            state=state.whole,
            shares=state.share,
            load=state.load,
            loads_by_name=True,
            weight=self._weight if self.mean and self.mean.group else None,
            forward_backward=whole_step,
            evaluate=self._evaluate if pipeline else None,
            spans=(lambda: pipeline.spans) if pipeline else None,
        )

    def _recorded_step(self) -> Callable[[Batch, int], Tensor] | None:
        """Returns forward and backward as one graph, or None if the network does not record."""
        if self.network.graphs is None:
            return None
        return self.tensor[0].recorded_step(
            self.network.graphs,
            self.network.context,
            wrapped=self.data.modules[0],
            weight=self._weight if self.mean and self.mean.group else None,
        )

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.mesh.mesh_dim_names or ()

    def _without_axis(self) -> dict[str, WithoutAxis]:
        """Returns the contexts for `Parallel.without_axis`. A pipeline cannot compute without the
        tensors that are sent to it, nor a module without its sharded weights.
        """
        contexts: dict[str, WithoutAxis] = {}
        if self.data.wrapped:
            contexts["data"] = self.data.without_communication
        if self.context:
            contexts["context"] = functools.partial(without_communication, self.context)
        if self.tensor:
            contexts["tensor"] = functools.partial(
                without_communication, [cut.stream for cut in self.tensor.values()]
            )
        return contexts

    def _clip(self, max_norm: float) -> Tensor:
        repeated = self.pipeline.repeated if self.pipeline else set()
        places: dict[nn.Parameter, tuple[int, str]] = {}  # stages of a rank may share a parameter
        for stage, module in self.data.plain.items():
            for name, parameter in module.named_parameters():
                places.setdefault(parameter, (stage, name))
        gradients, counted = [], []
        for parameter, (stage, name) in places.items():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            if id(parameter) not in repeated:
                copies = self.data.num_copies(parameter)
                pieces = self._pieces(stage, name, parameter.grad)
                counted += [(copies * ranks, piece) for ranks, piece in pieces]
        return clip_whole_norm(gradients, counted, max_norm, group=None, device=self.device)

    def _pieces(self, stage: int, name: str, gradient: Tensor) -> list[tuple[int, Tensor]]:
        """Returns this rank's pieces of a gradient, each with the number of ranks of the tensor axis
        that have the same piece.
        """
        part, first_row = gradient, 0
        if isinstance(gradient, DTensor):
            shards = gradient.device_mesh
            first_row = shards.get_local_rank() * ceil_div(gradient.shape[0], shards.size())
            part = gradient.to_local()
        if stage not in self.tensor:
            return [(1, part)]
        return self.tensor[stage].counted(name, part, first_row=first_row)

    def _forward_backward(self, batch: Batch, batches: int) -> Tensor:
        assert self.pipeline is not None, "the layout has a pipeline"
        inputs, targets = self.network.cut(batch)
        with self.data.deferring_reductions():
            loss = self.pipeline.step(inputs, targets, batches=batches)
        self.data.finish_reductions()
        return self._zero() if loss is None else loss.detach()

    def _evaluate(self, batch: Batch) -> Tensor:
        assert self.pipeline is not None, "the layout has a pipeline"
        loss = self.pipeline.evaluate(*self.network.cut(batch))
        weight = None if self.mean is None else self._weight(batch)
        if loss is None:
            return self._zero()
        return loss if weight is None else weighted(loss, weight)

    def _weight(self, batch: Batch) -> Tensor:
        assert self.mean is not None, "batches count unequal numbers of targets"
        return self.mean.weights([self.network.cut(batch)[1]], self.device)[0]

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device)


def mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    """Returns the ranks by axis of the layout. The context axis is part of the data axis, because its
    ranks hold equal weights too. All ranks must call it.
    """
    require_one_layout(layout)
    sizes = {"pipeline": layout.pipeline, "data": layout.num_replicas, "tensor": layout.tensor}
    axes = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def require_one_layout(layout: Layout) -> None:
    """Raises DifferentLayoutsError, on every rank, if the ranks' layouts differ or need another number
    of ranks.
    """
    layouts = gathered_objects(str(layout))
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            raise DifferentLayoutsError(
                f"the ranks' layouts differ: rank 0 has {layouts[0]!r}, rank {rank} has {other!r}"
            )
    if layout.ranks != len(layouts):
        raise DifferentLayoutsError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; there are {len(layouts)}"
        )


def context_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    """Returns the ranks that share this rank's sequences. All ranks must call it."""
    axes = layout.sizes
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return mesh.get_group("context")


def _names_under_wrappers(tied: Sequence[Tie], data: DataAxis) -> list[Tie]:
    """Returns the ties with the parameter names of the wrapped modules."""
    is_wrapped = any(data.modules[stage] is not data.plain[stage] for stage in data.modules)
    prefix = "module." if is_wrapped else ""
    return [[(stage, prefix + name) for stage, name in tie] for tie in tied]
