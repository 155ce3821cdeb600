"""A user's network under a layout: its layers cut by its table, and its nn.Sequential into stages."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.parallel.layout import Network, spread
from stepgauge.parallel.pipeline.stage import as_tuple
from stepgauge.parallel.pipeline.tied import with_shared
from stepgauge.parallel.tensor_parallel.tensor_parallel import table_by_config
from stepgauge.parallel.training import Groups, OptimizerClass, Parallel, Parallelise
from stepgauge.parallel.trial import trial
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.stages import cut_parts
from stepgauge.spec.plan.tensor import Table, is_named, matched
from stepgauge.spec.train import TrainSpec
from stepgauge.train.layout import on_data_axis, wrapper_settings
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.user_model import (
    SpreadParts,
    UserParts,
    UserStep,
    build_user_step,
    inputs_and_targets,
    leaves_of,
    moved,
    scalar_loss,
    tensors_of,
    with_leaves,
)

Loss = Callable[..., Any] | None


def build_user_layout_step(
    spec: LayoutSpec, *, layout: Layout, device: torch.device, lr: float
) -> UserStep:
    """The step of a user's model. All ranks must call it.

    Raises what build_user_step does, ValueError for a network that the layout cannot cut, and where
    the ranks have different layouts.
    """
    return build_user_step(spec, device, spread=over_layout(spec, layout, device), lr=lr)


def over_layout(spec: LayoutSpec | TrainSpec, layout: Layout, device: torch.device) -> SpreadParts:
    """How the layout spreads a user's network, of what its factory gave."""

    def of_parts(parts: UserParts) -> Parallelise:
        if layout.data == layout.ranks:
            return on_data_axis(spec, layout)
        return functools.partial(_spread, spec, layout, device, UserCut.of(parts, layout, device))

    return of_parts


def _spread(
    spec: LayoutSpec | TrainSpec,
    layout: Layout,
    device: torch.device,
    cut: "UserCut",
    module: nn.Module,
    groups: Groups,
    optimizer: OptimizerClass,
) -> Parallel:
    stages = cut.stages_of(module)
    tables = [cut.table_of(stage) for stage in stages]
    built = dict(enumerate(stages))
    network = Network(
        build=built.pop,
        table=tables.__getitem__,
        schedule=schedule_of(layout) if layout.pipeline > 1 else None,
        tied=with_shared([], stages) if len(stages) > 1 else (),
        cut=cut.batch,
        context=functools.partial(PRECISIONS[spec.precision].autocasting, device),
        graphs=CudaGraphs(device) if isinstance(spec, LayoutSpec) and spec.cuda_graphs else None,
    )
    parallel = spread(
        layout,
        network,
        groups,
        optimizer,
        settings=wrapper_settings(spec, layout.wrapper),
        device=device,
        recording=isinstance(spec, LayoutSpec),
    )
    built.clear()  # the stages of other ranks
    return parallel


@dataclasses.dataclass(frozen=True)
class UserCut:
    """How a layout cuts a user's network.

    table   rules of its layers
    stages  modules of its nn.Sequential by stage; none without a pipeline
    loss    of the last stage
    like    targets as the loss takes them
    """

    table: Table
    stages: Sequence[range]
    loss: Loss
    like: Any

    @classmethod
    def of(cls, parts: UserParts, layout: Layout, device: torch.device) -> "UserCut":
        """Raises ValueError for a network or a batch that cannot be cut so."""
        table = table_of_user(parts) if layout.tensor > 1 else {}
        if layout.pipeline == 1:
            return cls(table, (), parts.loss, None)
        batch, has_loss = parts.batches(0), parts.loss is not None
        inputs, targets = tensors_of(batch, has_loss=has_loss)
        for tensor in (*inputs, *targets):
            if tensor.ndim == 0 or len(tensor) % layout.microbatches:
                raise ValueError(
                    f"the batch has a tensor of shape {tuple(tensor.shape)}, whose first dim "
                    f"m{layout.microbatches} of {str(layout)!r} does not divide"
                )
        micro_batch = [tensor.chunk(layout.microbatches)[0].to(device) for tensor in inputs]
        stages = cut_sequential(moved(parts.module, device), schedule_of(layout), micro_batch)
        like = with_leaves(inputs_and_targets(batch)[1], [None] * len(targets)) if has_loss else ()
        return cls(table, stages, parts.loss, like)

    def stages_of(self, module: nn.Module) -> list[nn.Module]:
        """The whole, without a pipeline."""
        if not self.stages:
            return [module]
        children = [*module.named_children()]
        runs = [collections.OrderedDict(children[n] for n in run) for run in self.stages]
        return [*map(Run, runs[:-1]), LastRun(runs[-1], self.loss, self.like)]

    def table_of(self, stage: nn.Module) -> Table:
        """The rules of the layers that the stage has."""
        names = [name for name, _ in stage.named_modules()]
        return {
            pattern: rule
            for pattern, rule in self.table.items()
            if any(is_named(name, pattern) for name in names)
        }

    def batch(self, batch: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        (given,) = batch
        return tensors_of(given, has_loss=self.loss is not None)


def table_of_user(parts: UserParts) -> Table:
    """The factory's, or that of a network of the transformers library. Raises ValueError for one
    that has neither, and for a name of no module.
    """
    try:
        table = table_by_config(parts.module) if parts.table is None else parts.table
    except ValueError as error:
        raise ValueError(f"{error}, which the factory returns as 'table'") from None
    collections.deque(matched(table, [name for name, _ in parts.module.named_modules()]), 0)
    return table


class Run(nn.Sequential):
    """Some modules of a user's nn.Sequential, by the names that they have there: a stage that is
    called with the tensors of the one before it.
    """

    def forward(self, *given: Tensor) -> Any:
        return super().forward(given if len(given) > 1 else given[0])


class LastRun(Run):
    """The last ones, called with the targets too: gives the loss.

    like  targets as the loss takes them; without a loss the output says it
    """

    def __init__(self, modules: collections.OrderedDict[str, nn.Module], loss: Loss, like: Any):
        super().__init__(modules)
        self.like = like
        # what a network trains is in its stages, not in a loss that is a module
        self.loss = None if loss is None else functools.partial(loss)

    def forward(self, *given: Tensor) -> Tensor:
        if self.loss is None:
            return scalar_loss(super().forward(*given))
        first = len(given) - len(leaves_of(self.like))
        inputs, targets = given[:first], with_leaves(self.like, given[first:])
        return scalar_loss(self.loss(super().forward(*inputs), targets))


def cut_sequential(module: nn.Module, schedule: Schedule, inputs: Sequence[Tensor]) -> list[range]:
    """The modules of each stage of an nn.Sequential, such that the ranks have about equal FLOPs of
    such inputs. Raises ValueError for another network, or one of fewer modules.
    """
    if type(module).forward is not nn.Sequential.forward:
        raise ValueError(
            f"the factory's module is a {type(module).__name__}; a pipeline cuts an nn.Sequential, "
            f"each module of which takes what the one before gives"
        )
    modules = [*module.children()]
    if len(modules) < len(module):  # type: ignore[arg-type]
        raise ValueError("a module stands twice in the nn.Sequential; a pipeline runs each once")
    if schedule.num_stages > len(modules):
        raise ValueError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {schedule.num_stages} stages; the "
            f"nn.Sequential has {len(modules)} modules"
        )
    return cut_parts(flops_of(modules, inputs), schedule)


def flops_of(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[float]:
    """Of each in forward, one after the other; 1 of one that torch counts none of."""
    found, given = [], tuple(inputs)
    for number, module in enumerate(modules, start=1):
        with torch.no_grad(), trial(module, given), FlopCounterMode(display=False) as counter:
            output = module(given if len(given) > 1 else given[0])
        found.append(max(1.0, float(counter.get_total_flops())))
        given = as_tuple(output) if number < len(modules) else ()
    return found
