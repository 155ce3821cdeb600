"""Tensor parallel: cuts the layers of any module over ranks, by a table of names and rules
(spec/plan/tensor.py).

    parallel = parallelize_tensor(model, table, group=group)
    parallel.module(tokens, targets).backward()

Every rank gets the same batch, has its part of each weight, and computes the same loss. When
backward returns, `.grad` of a cut weight is this rank's part of the gradient, and `.grad` of a
whole weight is the whole gradient.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import share_forward_hooks
from stepgauge.parallel.communication.groups_by_name import register
from stepgauge.parallel.communication.peer_memory import copies_reach, on_one_machine
from stepgauge.parallel.graphed_gradients import Context, GraphedGradients
from stepgauge.parallel.replicas import device_of, prepare_replicas
from stepgauge.parallel.tensor_parallel.cuts import Cuts, cut_parameters
from stepgauge.parallel.tensor_parallel.exchange import (
    PartSum,
    captured_turns,
    part_sum_by_torch,
    use_part_sum,
)
from stepgauge.parallel.tensor_parallel.gradient_sums import GradientSum, SumHooks, gradient_sums
from stepgauge.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    to_compute_dtype,
)
from stepgauge.parallel.tensor_parallel.partial_gradients import PartialGradientCheck
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_parallel.rules import Rules, rules_of
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.runtime.recording import Recorder
from stepgauge.spec.plan.tensor import Table, is_by_sequence, is_by_token
from stepgauge.spec.plan.transformers_tables import table_of_config


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """A module whose layers are cut over ranks.

    cuts     how parameters are cut, by name
    sums     how gradients are summed over ranks, by name, for those of which each rank computes
             only a summand
    hooking  registers the hooks that compute these sums; must be removed before the parameters are
             replaced by others that need different hooks
    """

    module: nn.Module
    stream: ResidualStream
    cuts: Cuts
    sums: Mapping[str, GradientSum]
    hooking: SumHooks

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole parameter, or of a tensor with its shape."""
        return self.cuts[name].part(whole) if name in self.cuts else whole

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Returns the whole tensor from the parts of all ranks. All ranks must call it."""
        if name not in self.cuts:
            return part
        cut = self.cuts[name]
        shape = list(part.shape)
        shape[cut.dim] = cut.size
        whole = part.new_zeros(shape)
        for rows, copies, piece in cut.pieces(part):
            whole.narrow(cut.dim, rows.start, rows.stop - rows.start).add_(piece / copies)
        dist.all_reduce(whole, group=self.stream.group)
        return whole

    def whole_sizes(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Yields each parameter with the number of elements of the whole one, which is the same on
        all ranks.
        """
        for name, parameter in self.module.named_parameters():
            elements = parameter.numel()
            if name in self.cuts:
                cut = self.cuts[name]
                elements = elements // parameter.shape[cut.dim] * cut.size
            yield parameter, elements

    def recorded_step(
        self,
        recorder: Recorder,
        context: Context = contextlib.nullcontext,
        *,
        wrapped: nn.Module | None = None,
        weight: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> GraphedGradients:
        """Returns forward and backward of the module as one graph, to be called with a batch and 1. The
        host then launches one graph per step; smaller collectives overlap.

            step = parallel.recorded_step(CudaGraphs(device))
            loss = step((tokens, targets), 1)

        context  entered around forward, such as autocast
        wrapped  the module in a data parallel wrapper, whose communication is recorded too
        weight   see GraphedGradients
        """
        self.stream.replayed = True
        return GraphedGradients(
            wrapped or self.module,
            recorder,
            context,
            around=lambda: captured_turns(self.stream.group),
            weight=weight,
        )

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clips the norm of the whole network's gradients. Returns the norm before."""
        gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        counted = [piece for each in gradients.items() for piece in self.counted(*each)]
        device = next(self.module.parameters()).device
        group = self.stream.group
        return clip_whole_norm(gradients.values(), counted, max_norm, group=group, device=device)

    def counted(self, name: str, part: Tensor, *, first_row: int = 0) -> list[tuple[int, Tensor]]:
        """Splits a part into pieces, each with the number of ranks that have it. If the part is
        sharded further along dim 0, `part` is the shard that begins at row `first_row` of it.
        """
        if name not in self.cuts:
            return [(self.stream.ranks, part)]
        cut = self.cuts[name]
        pieces, begin = [], 0 if cut.dim else -first_row
        for rows, copies in zip(cut.slices, cut.copies, strict=True):
            end = begin + rows.stop - rows.start
            start, stop = (min(max(0, edge), part.shape[cut.dim]) for edge in (begin, end))
            pieces.append((copies, part.narrow(cut.dim, start, stop - start)))
            begin = end
        return pieces


def parallelize_tensor(
    module: nn.Module, table: Table | None = None, *, group: dist.ProcessGroup | None = None,
    by_sequence: bool | None = None, by_token: bool | None = None, overlap: bool | None = None,
    partial_loss: PartialLoss | None = None, part_sum: PartSum = part_sum_by_torch,
) -> TensorParallel:  # fmt: skip
    """Cuts the module's layers in place, as the table says. All ranks of the group must call it.

    Every rank passes the whole module; the values of rank 0 are used. Layers and parameters are
    replaced, so create optimizers and register hooks afterwards. If the parent of a "head" has a
    method `compute_loss(hidden, weight, targets, ...)`, it becomes one that never holds all logits.

    table        None: built from the config of a network of the transformers library
    by_sequence  norms and the residual stream have one piece of the sequence per rank, along dim 1
                 of the first block's input. None: True if the table has a rule split or sequence
    by_token     these pieces are of the batch's tokens in order. None: True if these rules say so
    overlap      large collectives run at the same time as products. None: True if by_sequence,
                 between GPUs of one machine that reach each other's memory (peer access)
    partial_loss kernels.linear_cross_entropy.partial: the head then holds no logits for its loss
    part_sum     with overlap, sums what a rank gets from others; kernels.part_sum is faster than torch

    Raises ValueError if the table does not fit the module, or if the results would differ from one
    process; DifferentModelsError if ranks have different networks. The first training forward
    raises RuntimeError if a whole parameter would get only a part of its gradient.
    """
    group = group or dist.group.WORLD
    assert group is not None, "tensor parallel needs a process group"
    table = table_by_config(module) if table is None else table
    by_sequence = is_by_sequence(table) if by_sequence is None else by_sequence
    by_token = is_by_token(table) if by_token is None else by_token
    stream = ResidualStream(group, by_sequence, by_token)
    prepare_replicas(module, group)
    _set_overlap(stream, device_of(module), overlap, part_sum)
    rules = rules_of(module, table, by_sequence=by_sequence)
    cuts = cut_parameters(module, rules, stream.rank, stream.ranks)
    _apply(module, rules, stream, cuts, partial_loss)
    sums = gradient_sums(module, rules, cuts, stream)
    module.register_forward_hook(PartialGradientCheck({*cuts, *sums}, stream))
    return TensorParallel(module, stream, cuts, sums, SumHooks(module, sums, stream))


def _apply(
    module: nn.Module,
    rules: Rules,
    stream: ResidualStream,
    cuts: Cuts,
    partial_loss: PartialLoss | None,
) -> None:
    for name, rule in rules:
        APPLY[rule.kind](module, name, stream, cuts)
    for name, rule in rules:
        part = module.get_submodule(name)
        if rule.kind == "gather":
            for layer in part.modules():
                if isinstance(layer, ColumnParallelLinear):
                    layer.gathers = False
        for count in rule.counts:
            setattr(part, count.attribute, count.value(stream.ranks))
    _prepare_parts(module, partial_loss)


def table_by_config(module: nn.Module) -> Table:
    """Returns the table of a network of the transformers library. Raises ValueError for another."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(
            f"a {type(module).__name__} has no config of the transformers library to make a table "
            f"from; give a table of names and rules"
        )
    return table_of_config(config.to_dict(), [name for name, _ in module.named_modules()])


def _set_overlap(
    stream: ResidualStream, device: torch.device, overlap: bool | None, part_sum: PartSum
) -> None:
    group = stream.group
    if overlap is None:
        overlap = stream.by_sequence and copies_reach(group, device)
    if overlap and not stream.by_sequence:
        raise ValueError("overlap is True, which needs by_sequence=True")
    if overlap and not on_one_machine(group):
        raise ValueError("overlap is True, which needs the ranks of the tensor axis on one machine")
    if overlap and device.type == "cuda" and not copies_reach(group, device):
        raise ValueError("overlap is True, which needs GPUs that can read each other's memory")
    if overlap:
        register(group)
        use_part_sum(group, part_sum)
    stream.overlap = overlap


def _column(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    sections = tuple(rows.stop - rows.start for rows in cuts[f"{name}.weight"].slices)
    _replace(module, name, ColumnParallelLinear(_get(module, name), stream, sections))


def _row(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    _replace(module, name, RowParallelLinear(_get(module, name), stream))


def _embedding(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    cut, layer = cuts[f"{name}.weight"], _get(module, name)
    part = VocabularyParallelEmbedding(layer, stream, cut.slices[0].start, cut.size)
    share_forward_hooks(layer, part)
    _replace(module, name, part)


def _head(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    cut = cuts[f"{name}.weight"]
    head = VocabularyParallelHead(_get(module, name), stream, cut.slices[0].start, cut.size)
    _replace(module, name, head)
    parent = module.get_submodule(name.rpartition(".")[0])
    if hasattr(parent, "compute_loss"):
        parent.compute_loss = head.loss  # type: ignore[assignment]


def _split(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    change_first_argument(module.get_submodule(name), stream.split)


def _gather(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    def gather(x: Tensor) -> Tensor:
        return stream.gather_input(to_compute_dtype(x))

    change_first_argument(module.get_submodule(name), gather)


def change_first_argument(part: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Applies `change` to the first argument of each forward, whether positional or by keyword."""
    first = next(iter(inspect.signature(part.forward).parameters))

    def pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, first: change(kwargs[first])}

    part.register_forward_pre_hook(pre_hook, with_kwargs=True)


def _unchanged(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    """The module itself does not change; its gradients may be summed over ranks."""


Apply = Callable[[nn.Module, str, ResidualStream, Cuts], None]
APPLY: Mapping[str, Apply] = {
    "column": _column,
    "row": _row,
    "embedding": _embedding,
    "head": _head,
    "split": _split,
    "gather": _gather,
    "sequence": _unchanged,
    "whole": _unchanged,
    "heads": _unchanged,
}


def _get(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)


def _replace(module: nn.Module, name: str, part: nn.Module) -> None:
    part.train(module.get_submodule(name).training)
    module.set_submodule(name, part)


def _prepare_parts(module: nn.Module, partial_loss: PartialLoss | None) -> None:
    for part in module.modules():
        if isinstance(part, VocabularyParallelHead):
            part.partial_loss = partial_loss
        if isinstance(part, nn.TransformerEncoderLayer):
            # In inference it would read the weights of its layers instead of calling them, unless
            # it has a hook.
            part.register_forward_pre_hook(lambda *_: None)
