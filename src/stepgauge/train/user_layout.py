"""Builds a user's training step under a layout: tensor parallelism cuts layers by a table of rules,
and a pipeline cuts an nn.Sequential into stages.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.kernels.part_sum import part_sum
from stepgauge.parallel.autograd.parameter_hooks import hooks_of_module
from stepgauge.parallel.layout import Network, spread
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
    required_scalar,
    scalar_loss,
    tensors_of,
    with_leaves,
)

Loss = Callable[..., Any] | None


def build_user_layout_step(
    spec: LayoutSpec, *, layout: Layout, device: torch.device, lr: float
) -> UserStep:
    """Returns this rank's part of a user's step. All ranks must call it.

    Raises what build_user_step does, and ValueError for a network that the layout cannot cut, or if
    the ranks have different layouts.
    """
    return build_user_step(spec, device, spread=over_layout(spec, layout, device), lr=lr)


def over_layout(spec: LayoutSpec | TrainSpec, layout: Layout, device: torch.device) -> SpreadParts:
    """Returns a function that distributes a user's network, given the parts of its factory."""

    def parallelise_parts(parts: UserParts) -> Parallelise:
        if layout.data == layout.ranks:
            return on_data_axis(spec, layout)
        return functools.partial(_spread, spec, layout, device, UserCut.of(parts, layout, device))

    return parallelise_parts


def _spread(
    spec: LayoutSpec | TrainSpec,
    layout: Layout,
    device: torch.device,
    cut: "UserCut",
    module: nn.Module,
    groups: Groups,
    optimizer: OptimizerClass,
) -> Parallel:
    """Returns this rank's part of the network, with its optimizer."""
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
        part_sum=part_sum,
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
    built.clear()  # frees the stages of other ranks
    return parallel


@dataclasses.dataclass(frozen=True)
class UserCut:
    """How a layout cuts a user's network.

    table    rules that cut the layers
    stages   indices of the nn.Sequential's modules, by stage; empty without a pipeline
    inputs   the structure of each stage's input, such as a tuple, with a type for each tensor
    loss     the loss function of the last stage
    targets  the structure of the targets
    """

    table: Table
    stages: Sequence[range]
    inputs: Sequence[Any]
    loss: Loss
    targets: Any

    @classmethod
    def of(cls, parts: UserParts, layout: Layout, device: torch.device) -> "UserCut":
        """Returns the cut. Raises ValueError for a network or a batch that cannot be cut this way."""
        table = table_of_user(parts) if layout.tensor > 1 else {}
        if layout.pipeline == 1:
            return cls(table, (), (), parts.loss, None)
        check_is_plain_sequential(parts.module)  # before the batch, which a user can change
        batch, has_loss = parts.batches(0), parts.loss is not None
        inputs, targets = tensors_of(batch, has_loss=has_loss)
        for tensor in (*inputs, *targets):
            if tensor.ndim == 0 or len(tensor) % layout.microbatches:
                raise ValueError(
                    f"the batch has a tensor of shape {tuple(tensor.shape)}, whose first dimension "
                    f"cannot be divided into the {layout.microbatches} micro-batches of "
                    f"{str(layout)!r}"
                )
        arguments, target = inputs_and_targets(batch) if has_loss else (batch, ())
        micro_batch = [tensor.chunk(layout.microbatches)[0].to(device) for tensor in inputs]
        argument = only_argument(with_leaves(arguments, micro_batch))
        stages, structures = cut_sequential(
            moved(parts.module, device), schedule_of(layout), argument
        )
        return cls(table, stages, structures, parts.loss, structure_of(target))

    def stages_of(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules of all stages; without a pipeline the whole module."""
        if not self.stages:
            return [module]
        children = [*module.named_children()]
        runs = [collections.OrderedDict(children[n] for n in run) for run in self.stages]
        last = LastStage(runs[-1], self.inputs[-1], self.loss, self.targets)
        return [*map(Stage, runs[:-1], self.inputs[:-1]), last]

    def table_of(self, stage: nn.Module) -> Table:
        """Returns the rules that apply to layers of the stage."""
        names = [name for name, _ in stage.named_modules()]
        return {
            pattern: rule
            for pattern, rule in self.table.items()
            if any(is_named(name, pattern) for name in names)
        }

    def batch(self, arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors of the inputs and of the targets."""
        (batch,) = arguments
        return tensors_of(batch, has_loss=self.loss is not None)


def table_of_user(parts: UserParts) -> Table:
    """Returns the factory's table, or that of a network of the transformers library.

    Raises ValueError for a network without either, and for a rule whose name matches no module.
    """
    try:
        table = table_by_config(parts.module) if parts.table is None else parts.table
    except ValueError as error:
        raise ValueError(
            f"{error}, which the factory returns as 'table' (docs/tensor-parallel.md)"
        ) from None
    collections.deque(matched(table, [name for name, _ in parts.module.named_modules()]), 0)
    return table


def uncut_axes(parts: UserParts) -> dict[str, str]:
    """Returns, by axis, why the network cannot be cut along it, however many ranks there are."""
    reasons = {}
    for axis, check in (("tensor", table_of_user), ("pipeline", _check_is_stack)):
        try:
            check(parts)
        except ValueError as error:
            reasons[axis] = str(error)
    return reasons


def _check_is_stack(parts: UserParts) -> None:
    """Raises ValueError for a network that no pipeline can cut, and for a batch of several inputs."""
    check_is_plain_sequential(parts.module)
    batch = parts.batches(0)
    only_argument(inputs_and_targets(batch)[0] if parts.loss is not None else batch)


class Stage(nn.Sequential):
    """Some modules of a user's nn.Sequential, with the names that they have there. It is called with
    the tensors that the stage before returned.

    structure  of the first module's input, which consists of these tensors

    Names of attributes begin with an underscore, since modules may have any other name.
    """

    def __init__(self, modules: collections.OrderedDict[str, nn.Module], structure: Any):
        super().__init__(modules)
        self._structure = structure

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaves_of(self._output(tensors)))

    def _output(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the last module's output."""
        return super().forward(with_leaves(self._structure, tensors))


class LastStage(Stage):
    """The last stage, which is also called with the targets and returns the loss.

    targets  the structure of the targets; without a loss function the output is the loss
    """

    def __init__(
        self,
        modules: collections.OrderedDict[str, nn.Module],
        structure: Any,
        loss: Loss,
        targets: Any,
    ):
        super().__init__(modules, structure)
        self._targets = targets
        # A partial, so that a loss that is a module does not become a submodule of the stage.
        self._loss = None if loss is None else functools.partial(loss)

    def forward(self, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        if self._loss is None:
            return scalar_loss(self._output(tensors))
        first = len(tensors) - len(leaves_of(self._targets))
        targets = with_leaves(self._targets, tensors[first:])
        return required_scalar(self._loss(self._output(tensors[:first]), targets))


def structure_of(value: Any) -> Any:
    """Returns the value's tuples, lists and mappings, with the type of each leaf in its place."""
    return with_leaves(value, [type(leaf) for leaf in leaves_of(value)])


def only_argument(arguments: Any) -> Any:
    """Returns the argument with which an nn.Sequential is called. Raises ValueError for several."""
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if not isinstance(arguments, tuple | list):
        return arguments
    if len(arguments) != 1:
        raise ValueError(f"the batch has {len(arguments)} inputs; an nn.Sequential takes one")
    return arguments[0]


def cut_sequential(
    module: nn.Module, schedule: Schedule, argument: Any
) -> tuple[list[range], list[Any]]:
    """Returns the indices of the modules in each stage, such that the ranks have about equal FLOPs
    for this argument, and the structure of each stage's input. Raises ValueError for a network that
    cannot be cut into these stages.
    """
    children = dict(module.named_children())
    if schedule.num_stages > len(children):
        raise ValueError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {schedule.num_stages} stages; the "
            f"nn.Sequential has {len(children)} modules"
        )
    flops, structures = run_once([*children.values()], argument)
    stages = cut_parts(flops, schedule)
    for border in [stage.start for stage in stages[1:]]:
        for leaf in leaves_of(structures[border]):
            if not issubclass(leaf, Tensor):
                raise ValueError(
                    f"module {[*children][border - 1]!r} of the nn.Sequential returns "
                    f"{leaf.__name__} and is the last of a stage; a stage can only send tensors, in "
                    f"tuples, lists and dicts"
                )
    return stages, [structures[stage.start] for stage in stages]


def check_is_plain_sequential(module: nn.Module) -> None:
    """Raises ValueError for a module that does more than call its children one after the other."""
    kind = type(module)
    if getattr(module.forward, "__func__", None) is not nn.Sequential.forward:
        own = " with its own forward" if isinstance(module, nn.Sequential) else ""
        raise ValueError(
            f"the factory's module is a {kind.__name__}{own}; a pipeline cuts an nn.Sequential, in "
            f"which each module is called with the output of the one before"
        )
    if kind.__call__ is not nn.Sequential.__call__:
        raise ValueError(
            f"the factory's module is a {kind.__name__} with its own __call__, which no stage would "
            f"run; a pipeline only runs the modules of an nn.Sequential"
        )
    if hooks_of_module(module):
        raise ValueError(
            "the factory's nn.Sequential has hooks, which no stage would run; register them on its "
            "first or last module"
        )
    held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    if held:
        raise ValueError(
            f"the factory's nn.Sequential has {held[0][0]!r} itself, which no stage would have; give it to "
            f"the module that uses it"
        )
    if len({*module.children()}) < len(module):  # type: ignore[arg-type]
        raise ValueError(
            "the nn.Sequential contains a module twice; a pipeline can run each module only once"
        )


def run_once(modules: Sequence[nn.Module], argument: Any) -> tuple[list[float], list[Any]]:
    """Runs the modules one after the other. Returns each module's forward FLOPs, at least 1, and the
    structure of its input.
    """
    flops, structures = [], []
    for module in modules:
        structures.append(structure_of(argument))
        tensors = [leaf for leaf in leaves_of(argument) if isinstance(leaf, Tensor)]
        with torch.no_grad(), trial(module, tensors), FlopCounterMode(display=False) as counter:
            argument = module(argument)
        flops.append(max(1.0, float(counter.get_total_flops())))
    return flops, structures
