"""What one rank of a layout computes as a step of its own: a stage of the network, with layers and
sequences cut, in a world whose other ranks are imagined.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.measure.sent_operators import Axis
from stepgauge.models.parts import build_optimizer
from stepgauge.parallel.layout import context_group, mesh_of
from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.runtime.imagined_world import imagined_world
from stepgauge.spec.layout import Layout
from stepgauge.spec.plan.stages import halves_of, num_parts
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import WorkSpec
from stepgauge.train.build import WEIGHT_DECAY, batch_for, decay_groups
from stepgauge.train.layout import build_parts, cut_sequences, partial_loss_of, stage_batch
from stepgauge.train.precision import precision_on
from stepgauge.train.step import TrainingStep


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a rank computes of a network.

    work    the step of one process that has the whole
    layout  how layers and sequences are cut; without a data axis
    parts   of the network, as spec.plan.stages numbers them; None: all
    """

    work: WorkSpec
    layout: Layout = dataclasses.field(default_factory=Layout)
    parts: range | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the step of one process."""
        return self.layout.ranks == 1 and self.parts is None

    @property
    def all_parts(self) -> range:
        return self.parts or range(num_parts(self.work.network.num_layers))


class StageStep(TrainingStep):
    """A stage between others: called with what the stage before it gives, it goes back from a gradient
    of what it gives itself.
    """

    def forward(self, *batch: Any) -> Tensor:
        first, *rest = batch
        leaf = first.detach().requires_grad_() if first.is_floating_point() else first
        return super().forward(leaf, *rest)

    def backward(self, loss: Tensor) -> None:
        loss.backward(None if loss.ndim == 0 else torch.empty_like(loss))


@contextlib.contextmanager
def other_ranks(layout: Layout) -> Iterator[Mapping[str, Any]]:
    """The groups of the layout's axes, by the name of the axis. Before tensors have no memory: what
    ranks are in a group is computed.
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
    """By the name of the group."""
    return {group.group_name: Axis(name, group.size()) for name, group in groups.items()}


def build_stage_step(
    stage: Stage, device: torch.device, groups: Mapping[str, Any], weights: torch.dtype | None
) -> tuple[TrainingStep, Sequence[Any]]:
    """The step and what it takes. `weights`: another type of these, as ZeRO 3 computes."""
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
    hidden = functools.partial(
        torch.empty, work.batch, model.context_length // layout.context // layout.tensor,
        model.d_model, device=device, dtype=weights or precision.parameters,
    )  # fmt: skip
    return step, stage_batch(model, parts, batch, hidden)
