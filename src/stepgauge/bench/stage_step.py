"""Builds the work of one rank of a layout as a training step in a single process: a pipeline stage,
with its layers and sequences sharded, in a process group whose other ranks are simulated.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.measure.collective_operators import Axis
from stepgauge.models.parts import build_optimizer
from stepgauge.parallel.layout import context_group, mesh_of
from stepgauge.parallel.pipeline.stage import as_tuple
from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.parallel.training import Groups, OptimizerClass, Parallel
from stepgauge.runtime.imagined_world import imagined_world
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.plan.stages import halves_of, num_parts
from stepgauge.spec.plan.tensor import is_by_sequence, is_by_token
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import WEIGHT_DECAY, batch_for, decay_groups
from stepgauge.train.layout import build_parts, cut_sequences, partial_loss_of, stage_batch
from stepgauge.train.precision import precision_on
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_layout import UserCut
from stepgauge.train.user_model import build_parts as build_user_parts
from stepgauge.train.user_model import in_type, step_of_parts


@dataclasses.dataclass(frozen=True)
class Stage:
    """The share of a network that one rank computes.

    work    the step of a single process with the whole network
    layout  how layers and sequences are sharded, without a data axis. For a user's model it includes
            the pipeline.
    parts   the stage's parts of the network, as numbered in spec.plan.stages; None: all
    number  the stage's number; only for a user's model, which is split when it is built
    """

    work: WorkSpec
    layout: Layout = dataclasses.field(default_factory=Layout)
    parts: range | None = None
    number: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the rank computes the whole network."""
        return self.layout.ranks == 1 and self.parts is None

    @property
    def is_in_pipeline(self) -> bool:
        return self.parts is not None or self.layout.pipeline > 1

    @property
    def is_last(self) -> bool:
        """True for the last stage; only for a user's model."""
        return self.number == schedule_of(self.layout).num_stages - 1

    @property
    def all_parts(self) -> range:
        return self.parts or range(num_parts(self.work.network.num_layers))


class StageStep(TrainingStep):
    """A pipeline stage between others: forward takes the previous stage's outputs, and backward
    starts from gradients of its own outputs.

    num_received    how many tensors of the batch come from the previous stage
    boundary_bytes  size of the activations received or sent, whichever is larger
    """

    num_received = 1
    boundary_bytes = 0

    def forward(self, *batch: Any) -> Any:
        received, others = batch[: self.num_received], batch[self.num_received :]
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in received]
        outputs = super().forward(*leaves, *others)
        self.boundary_bytes = max(map(_activation_bytes, (leaves, as_tuple(outputs))))
        return outputs

    def backward(self, loss: Any) -> None:
        outputs = [output for output in as_tuple(loss) if output.requires_grad]
        gradients = [None if x.ndim == 0 else torch.empty_like(x) for x in outputs]
        torch.autograd.backward(outputs, gradients)


def _activation_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the activations, without tokens and the loss."""
    return sum(x.nbytes for x in tensors if x.is_floating_point() and x.ndim)


@contextlib.contextmanager
def other_ranks(layout: Layout) -> Iterator[Mapping[str, Any]]:
    """Simulates the layout's other ranks and yields the process groups of its axes, by axis name.

    Enter it before a fake tensor mode, because building a group computes with real tensors.
    """
    if layout.ranks == 1:
        yield {}
        return
    with imagined_world(layout.ranks):
        mesh, groups = mesh_of(layout, "cpu"), {}
        if layout.tensor > 1:
            groups["tensor"] = mesh.get_group("tensor")
        if layout.context > 1:
            groups["context"] = context_group(layout, "cpu")
        yield groups


def axes_of(groups: Mapping[str, Any]) -> dict[str, Axis]:
    """Returns the axes by the name of their process group."""
    return {group.group_name: Axis(name, group.size()) for name, group in groups.items()}


def build_stage_step(
    stage: Stage, device: torch.device, groups: Mapping[str, Any], weights: torch.dtype | None
) -> tuple[TrainingStep, Sequence[Any]]:
    """Returns the stage's step and its arguments.

    weights  dtype to which the weights are cast, as ZeRO 3 computes in it
    """
    if isinstance(stage.work.model, UserModel):
        return _build_user_stage(stage, device, groups, weights)
    work, model, layout, parts = stage.work, stage.work.network, stage.layout, stage.all_parts
    precision = precision_on(work.precision, device)
    module = build_parts(work, layout, device, model, parts)
    if "context" in groups:
        cut_sequences(module, groups["context"], layout=layout)
    if "tensor" in groups:
        blocks = [*halves_of(parts, model.num_layers)]
        parallelize_tensor(
            module, table_of(model, range(blocks[0], blocks[-1] + 1)), group=groups["tensor"],
            overlap=layout.overlap, partial_loss=partial_loss_of(model),
        )  # fmt: skip
    if weights is not None:
        module.to(weights)
    optimizer = build_optimizer(
        work.optimizer, decay_groups(module, weight_decay=WEIGHT_DECAY),
        master_weights=precision.master_weights, lr=LEARNING_RATE,
    )  # fmt: skip
    step = StageStep(module, optimizer, precision, device)
    batch = [part.to(device) for part in batch_for(model, work.batch, work.seed)]
    make_hidden = functools.partial(
        torch.empty, work.batch, model.context_length // layout.context // layout.tensor,
        model.d_model, device=device, dtype=weights or precision.parameters,
    )  # fmt: skip
    return step, stage_batch(model, parts, batch, make_hidden)


def _build_user_stage(
    stage: Stage, device: torch.device, groups: Mapping[str, Any], weights: torch.dtype | None
) -> tuple[TrainingStep, Sequence[Any]]:
    """Builds a user's model on the device, splits it, and runs the stages before this one to get the
    stage's inputs.
    """
    work, layout = stage.work, stage.layout
    parts = build_user_parts(work, device)
    cut = UserCut.of(parts, layout, device)
    stages: list[nn.Module] = []

    def spread(module: nn.Module, grouped: Groups, optimizer: OptimizerClass) -> Parallel:
        stages.extend(cut.stages_of(module)[: stage.number + 1])
        for each in stages if "tensor" in groups else ():
            parallelize_tensor(
                each, cut.table_of(each), group=groups["tensor"], overlap=layout.overlap,
                by_sequence=is_by_sequence(cut.table), by_token=is_by_token(cut.table),
            )  # fmt: skip
        return Parallel(module=stages[-1], optimizer=optimizer(grouped(stages[-1])))

    built = step_of_parts(
        parts, device, precision=work.precision, optimizer=work.optimizer, parallelise=spread,
        lr=LEARNING_RATE,
    )  # fmt: skip
    step, batch = built.step, built.arguments(0)
    if weights is not None:
        step.module.to(weights)
        batch = in_type(batch, weights)
    if layout.pipeline == 1:
        return step, batch
    inputs, targets = cut.batch(batch)
    received: Sequence[Tensor] = [x.chunk(layout.microbatches)[0] for x in inputs]
    with torch.no_grad(), step.precision.autocasting(device):
        for previous in stages[:-1]:
            received = as_tuple(previous(*received))
    stage_targets = [x.chunk(layout.microbatches)[0] for x in targets] if stage.is_last else []
    stage_step = StageStep(step.module, step.optimizer, step.precision, device)
    stage_step.num_received = len(received) if stage.number else 0
    return stage_step, [*received, *stage_targets]
