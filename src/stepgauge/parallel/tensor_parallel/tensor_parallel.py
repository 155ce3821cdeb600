"""Tensor parallel: the layers of any module cut over ranks, by a table of names and rules
(spec.plan.tensor).

    parallel = parallelize_tensor(model, table, group=group)
    parallel.module(tokens, targets).backward()

Every rank sees the same batch, has its part of each weight, and gets the same loss. Gradients are
whole when backward returns: `.grad` of a part is the part of the gradient, `.grad` of a weight that
every rank has is the gradient.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.communication.peer_memory import on_one_machine
from stepgauge.parallel.replicas import prepare_replicas
from stepgauge.parallel.tensor_parallel.cuts import Cuts, cut_parameters
from stepgauge.parallel.tensor_parallel.exchange import register
from stepgauge.parallel.tensor_parallel.gradient_sums import GradientSum, Hooking, gradient_sums
from stepgauge.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    as_computed,
)
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_parallel.rules import Rules, rules_of
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.spec.plan.tensor import Table, is_by_sequence
from stepgauge.spec.plan.transformers_tables import table_of_config


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """A module whose layers are cut, and how.

    cuts  the parameters that are, by name
    sums  how the gradients are summed over ranks of which each finds a part, by name. Hooks of the
          parameters do it
    hooking  gives the hooks to parameters that forward finds in their place. Whoever puts
          parameters there that need other hooks removes it before
    """

    module: nn.Module
    stream: ResidualStream
    cuts: Cuts
    sums: Mapping[str, GradientSum]
    hooking: Hooking

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what belongs to one, that is given whole."""
        return self.cuts[name].part(whole) if name in self.cuts else whole

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse, of the parts of all ranks. All ranks must call it."""
        if name not in self.cuts:
            return part
        cut = self.cuts[name]
        shape = list(part.shape)
        shape[cut.dim] = cut.size
        whole = part.new_zeros(shape)
        for place, copies, piece in cut.pieces(part):
            whole.narrow(cut.dim, place.start, place.stop - place.start).add_(piece / copies)
        dist.all_reduce(whole, group=self.stream.group)
        return whole

    def whole_sizes(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each parameter with the elements of the whole: the same on all ranks, whatever its cut."""
        for name, parameter in self.module.named_parameters():
            elements = parameter.numel()
            if name in self.cuts:
                cut = self.cuts[name]
                elements = elements // parameter.shape[cut.dim] * cut.size
            yield parameter, elements

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm as a whole is at most this; gives the norm."""
        gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        counted = [piece for each in gradients.items() for piece in self.counted(*each)]
        device = next(self.module.parameters()).device
        group = self.stream.group
        return clip_whole_norm(gradients.values(), counted, max_norm, group=group, device=device)

    def counted(self, name: str, part: Tensor, *, first_row: int = 0) -> list[tuple[int, Tensor]]:
        """The pieces of a part, each with how many ranks have it. Of a part that is sharded further
        along dim 0, the shard that begins at `first_row`.
        """
        if name not in self.cuts:
            return [(self.stream.ranks, part)]
        cut = self.cuts[name]
        found, begin = [], 0 if cut.dim else -first_row
        for place, copies in zip(cut.places, cut.copies, strict=True):
            end = begin + place.stop - place.start
            start, stop = (min(max(0, edge), part.shape[cut.dim]) for edge in (begin, end))
            found.append((copies, part.narrow(cut.dim, start, stop - start)))
            begin = end
        return found


def parallelize_tensor(
    module: nn.Module,
    table: Table | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    by_sequence: bool | None = None,
    overlap: bool | None = None,
    partial_loss: PartialLoss | None = None,
) -> TensorParallel:
    """Cuts the module's layers in place, as the table says. All ranks of the group must call it.

    The module is whole on each rank, with any values: rank 0's are taken. A layer of rule "head"
    whose parent has a function `compute_loss(hidden, weight, targets, ...)` gives the parent one
    that never holds the logits of the whole vocabulary. Layers and parameters are new: optimizers
    and hooks come afterwards.

    table        None: by the config of a network of the transformers library
    by_sequence  norms and the residual stream have a piece of the sequence each, dim 1 of what the
                 first block takes; None: where a rule is split or sequence
    overlap      large collectives run beside products; None: by sequence, between GPUs of a machine
    partial_loss linear + cross-entropy over some of the vocabulary, such as kernels'
                 linear_cross_entropy.partial: the head then holds no logits for its loss

    Raises ValueError for a table that does not fit the module and for what would be computed
    otherwise than in one process; DifferentModelsError where ranks have different networks.
    """
    group = group or dist.group.WORLD
    assert group is not None, "tensor parallel runs in a process group"
    table = table_by_config(module) if table is None else table
    by_sequence = is_by_sequence(table) if by_sequence is None else by_sequence
    prepare_replicas(module, group)
    stream = _stream(module, group, by_sequence, overlap)
    rules = rules_of(module, table, by_sequence=by_sequence)
    cuts = cut_parameters(module, rules, stream.rank, stream.ranks)
    _apply(module, rules, stream, cuts)
    _prepare_parts(module, partial_loss)
    sums = gradient_sums(module, rules, cuts, stream)
    return TensorParallel(module, stream, cuts, sums, Hooking(module, sums, stream))


def _apply(module: nn.Module, rules: Rules, stream: ResidualStream, cuts: Cuts) -> None:
    for name, rule in rules:
        APPLY[rule.kind](module, name, stream, cuts)
    for name, rule in rules:
        part = module.get_submodule(name)
        if rule.kind == "gather":
            _leave_gathered(part)
        for count in rule.counts:
            setattr(part, count.attribute, count.value(stream.ranks))


def table_by_config(module: nn.Module) -> Table:
    """Of a network of the transformers library. Raises ValueError for another."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(
            f"a {type(module).__name__} has no config of the transformers library to make a table "
            f"from; give a table of names and rules"
        )
    return table_of_config(config.to_dict(), [name for name, _ in module.named_modules()])


def _stream(
    module: nn.Module, group: dist.ProcessGroup, by_sequence: bool, overlap: bool | None
) -> ResidualStream:
    if overlap is None:
        is_on_gpus = all(each.is_cuda for each in module.parameters())
        overlap = by_sequence and is_on_gpus and on_one_machine(group)
    if overlap and not by_sequence:
        raise ValueError("overlap is True and by_sequence False; only pieces are overlapped")
    if overlap and not on_one_machine(group):
        raise ValueError("overlap is True; it needs the ranks of the tensor axis on one machine")
    if overlap:
        register(group)
    return ResidualStream(group, by_sequence, overlap)


def _column(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    sections = tuple(place.stop - place.start for place in cuts[f"{name}.weight"].places)
    _replace(module, name, ColumnParallelLinear(_get(module, name), stream, sections))


def _row(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    _replace(module, name, RowParallelLinear(_get(module, name), stream))


def _embedding(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    cut = cuts[f"{name}.weight"]
    part = VocabularyParallelEmbedding(_get(module, name), stream, cut.places[0].start, cut.size)
    _replace(module, name, part)


def _head(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    cut = cuts[f"{name}.weight"]
    head = VocabularyParallelHead(_get(module, name), stream, cut.places[0].start, cut.size)
    _replace(module, name, head)
    parent = module.get_submodule(name.rpartition(".")[0])
    if hasattr(parent, "compute_loss"):
        parent.compute_loss = head.loss  # type: ignore[assignment]


def _split(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    change_first_argument(module.get_submodule(name), stream.split)


def _gather(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    change_first_argument(module.get_submodule(name), lambda x: stream.enter(as_computed(x)))


def change_first_argument(part: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Before each forward, whether it is given by position or by name."""
    first = next(iter(inspect.signature(part.forward).parameters))

    def pre_hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (change(given[0]), *given[1:]), named
        return given, {**named, first: change(named[first])}

    part.register_forward_pre_hook(pre_hook, with_kwargs=True)


def _leave(module: nn.Module, name: str, stream: ResidualStream, cuts: Cuts) -> None:
    """Nothing but its gradients differs from one process."""


Apply = Callable[[nn.Module, str, ResidualStream, Cuts], None]
APPLY: Mapping[str, Apply] = {
    "column": _column,
    "row": _row,
    "embedding": _embedding,
    "head": _head,
    "split": _split,
    "gather": _gather,
    "sequence": _leave,
    "whole": _leave,
    "heads": _leave,
}


def _get(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)


def _replace(module: nn.Module, name: str, part: nn.Module) -> None:
    part.train(module.get_submodule(name).training)
    module.set_submodule(name, part)


def _leave_gathered(module: nn.Module) -> None:
    """What the module has gathered its columns take as it is."""
    for part in module.modules():
        if isinstance(part, ColumnParallelLinear):
            part.gathers = False


def _prepare_parts(module: nn.Module, partial_loss: PartialLoss | None) -> None:
    for part in module.modules():
        if isinstance(part, VocabularyParallelHead):
            part.partial_loss = partial_loss
        if isinstance(part, nn.TransformerEncoderLayer):
            # In inference it reads the weights of its layers, but for modules with hooks.
            part.register_forward_pre_hook(lambda *_: None)
