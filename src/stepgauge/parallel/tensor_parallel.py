"""Tensor parallel: the layers of any module cut over ranks, by a table of names and rules
(spec.plan.tensor).

    parallel = parallelize_tensor(model, table, group=group)
    parallel.module(tokens, targets).backward()

Every rank sees the same batch, has its part of each weight, and gets the same loss. Gradients are
whole when backward returns: `.grad` of a part is the part of the gradient, `.grad` of a weight that
every rank has is the gradient.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stepgauge.parallel.exchange import register
from stepgauge.parallel.gradient_sums import SumsTogether
from stepgauge.parallel.parameter_hooks import taking_hooks
from stepgauge.parallel.peer_memory import on_one_machine
from stepgauge.parallel.replicas import prepare_replicas, registrations
from stepgauge.parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from stepgauge.parallel.vocabulary_loss import PartialLoss
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.spec.plan.tensor import KINDS, Cut, Rule, Section, Table, matched


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """A module whose layers are cut, and how.

    cuts  the parameters that are, by name, with the size that they have whole along the dim of
          their cut
    sums  how the gradients are summed over ranks of which each finds a part, by name. Hooks of the
          parameters do it
    hooking  gives the hooks to parameters that forward finds in their place. Whoever puts
          parameters there that need other hooks removes it
    """

    module: nn.Module
    stream: ResidualStream
    cuts: Mapping[str, tuple[Cut, int]]
    sums: Mapping[str, "GradientSum"]
    hooking: RemovableHandle

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what belongs to one, that is given whole."""
        if name not in self.cuts:
            return whole
        cut, size = self.cuts[name]
        return _part(whole, cut, self.stream.rank, self.stream.ranks, size)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse, of the parts of all ranks. All ranks must call it."""
        if name not in self.cuts:
            return part
        cut, size = self.cuts[name]
        shape = list(part.shape)
        shape[cut.dim] = size
        whole = part.new_zeros(shape)
        for index, copies, piece in _pieces(part, cut, self.stream, size):
            whole.narrow(cut.dim, index.start, index.stop - index.start).add_(piece / copies)
        dist.all_reduce(whole, group=self.stream.group)
        return whole

    def whole_sizes(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each parameter with the elements of the whole: the same on all ranks, whatever its cut."""
        for name, parameter in self.module.named_parameters():
            elements = parameter.numel()
            if name in self.cuts:
                cut, size = self.cuts[name]
                elements = elements // parameter.shape[cut.dim] * size
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
        cut, size = self.cuts[name]
        if cut.dim or not cut.sections:
            return [(1, part)]
        found, begin = [], -first_row
        for section, place in zip(
            cut.sections, cut.parts(size, self.stream.rank, self.stream.ranks), strict=True
        ):
            end = begin + place.stop - place.start
            rows = slice(max(0, begin), max(0, end))
            found.append((section.copies(self.stream.ranks), part[rows]))
            begin = end
        return found


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """A gradient of which each rank has found a part, or of a cut some rows of it.

    cut  of a parameter with rows that several ranks have; None: all ranks have all of it
    """

    stream: ResidualStream
    cut: Cut | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.cut is None:
            return self.stream.reduced(gradient)
        return _sum_copies(gradient, cut=self.cut, stream=self.stream)


def _is_on_gpus_of_one_machine(module: nn.Module, group: dist.ProcessGroup) -> bool:
    return all(each.is_cuda for each in module.parameters()) and on_one_machine(group)


def parallelize_tensor(
    module: nn.Module,
    table: Table,
    *,
    group: dist.ProcessGroup | None = None,
    by_sequence: bool = True,
    overlap: bool | None = None,
    partial_loss: PartialLoss | None = None,
) -> TensorParallel:
    """Cuts the module's layers in place, as the table says. All ranks of the group must call it.

    The module is whole on each rank, with any values: rank 0's are taken. A layer of rule "head"
    whose parent has a function `compute_loss(hidden, weight, targets, ...)` gives the parent one
    that never holds the logits of the whole vocabulary. Before an optimizer is built, since
    parameters are new.

    by_sequence  norms and the residual stream have a piece of the sequence each, dim 1 of what the
                 first block takes
    overlap      large collectives run beside products (parallel.overlapped); None: between GPUs of
                 one machine, where pieces by sequence allow it
    partial_loss linear + cross-entropy over some of the vocabulary, such as kernels'
                 linear_cross_entropy.partial: the head then holds no logits for its loss

    Raises ValueError for a name of the table that is no module, a layer that the rule does not know
    and a weight that cannot be cut; DifferentModelsError where ranks have different networks.
    """
    group = group or dist.group.WORLD
    assert group is not None, "tensor parallel runs in a process group"
    prepare_replicas(module, group)
    if overlap is None:
        overlap = by_sequence and _is_on_gpus_of_one_machine(module, group)
    stream = _stream(group, by_sequence, overlap)
    rules = list(matched(table, [name for name, _ in module.named_modules()]))
    for name, rule in rules:
        _check_layer(name, module.get_submodule(name), rule)
    cuts = _cut_parameters(module, rules, stream)
    for name, rule in rules:
        APPLY[rule.kind](module, name, rule, stream, cuts)
        if rule.kind == "head":
            _get(module, name).partial_loss = partial_loss
    sums = _sums(module, _summed(module, rules, by_sequence), cuts, stream)
    hooking = Hooking(sums, stream)
    hooking(module)
    return TensorParallel(module, stream, cuts, sums, module.register_forward_pre_hook(hooking))


def _stream(group: dist.ProcessGroup, by_sequence: bool, overlap: bool) -> ResidualStream:
    if overlap and not by_sequence:
        raise ValueError("overlap is True and by_sequence False; only pieces are overlapped")
    if overlap and not on_one_machine(group):
        raise ValueError("overlap is True; it needs the ranks of the tensor axis on one machine")
    if overlap:
        register(group)
    return ResidualStream(group, by_sequence, overlap)


def _sums(
    module: nn.Module,
    summed: list[nn.Parameter],
    cuts: Mapping[str, tuple[Cut, int]],
    stream: ResidualStream,
) -> dict[str, GradientSum]:
    """Of gradients of which each rank finds a part, and of rows that several ranks have."""
    whole, sums = dict.fromkeys(summed), {}
    for name, parameter in module.named_parameters():
        cut = cuts[name][0] if name in cuts else None
        has_copies = cut and any(section.copies(stream.ranks) > 1 for section in cut.sections)
        if parameter.is_floating_point() and (has_copies or parameter in whole):
            sums[name] = GradientSum(stream, cut)
    return sums


class Hooking:
    """Hooks that sum gradients, of the parameters that a module has when it is called: a deep copy
    and `load_state_dict(assign=True)` leave others in their place. Before forward; all ranks alike.
    """

    def __init__(self, sums: Mapping[str, GradientSum], stream: ResidualStream):
        self._sums, self._stream = sums, stream
        self._looked = (0, 0)  # at which module, after how many registrations
        self._hooked: dict[str, weakref.ref[nn.Parameter]] = {}

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._looked == (id(module), registrations()):
            return
        together = []
        for name, each in self._sums.items():
            parameter = module.get_parameter(name)
            if name in self._hooked and self._hooked[name]() is parameter:
                continue
            self._hooked[name] = weakref.ref(parameter)
            if each.cut is None:
                together.append(parameter)
                continue
            with taking_hooks(parameter):
                parameter.register_hook(each)
        SumsTogether(together, self._stream)
        self._looked = id(module), registrations()


def _cut_parameters(
    module: nn.Module, rules: Sequence[tuple[str, Rule]], stream: ResidualStream
) -> dict[str, tuple[Cut, int]]:
    """Puts each rank's part in the place of a parameter; by name the cut, and the whole length."""
    cuts: dict[str, tuple[Cut, int]] = {}
    cut_parameters: dict[Tensor, nn.Parameter] = {}  # so that ties stay
    for name, rule in rules:
        for key, parameter in list(module.get_submodule(name).named_parameters(recurse=False)):
            dim = KINDS[rule.kind].cuts.get(key)
            if dim is None:
                continue
            cut = rule.cut_of(key, parameter.shape[dim])
            assert cut is not None, "a dim has a cut"
            full_name = f"{name}.{key}".lstrip(".")
            cuts[full_name] = cut, parameter.shape[dim]
            if parameter not in cut_parameters:
                cut_parameters[parameter] = _cut(full_name, parameter, cut, stream)
            setattr(module.get_submodule(name), key, cut_parameters[parameter])
    return cuts


LAYERS = {"column": nn.Linear, "row": nn.Linear, "head": nn.Linear, "embedding": nn.Embedding}


def _check_layer(name: str, layer: nn.Module, rule: Rule) -> None:
    wanted = LAYERS.get(rule.kind, nn.Module)
    if not isinstance(layer, wanted):
        raise ValueError(
            f"{name} is a {type(layer).__name__}; the rule {rule.kind} cuts nn.{wanted.__name__}"
        )


def _cut(name: str, parameter: Tensor, cut: Cut, stream: ResidualStream) -> nn.Parameter:
    """The rank's part as a parameter."""
    size = parameter.shape[cut.dim]
    try:
        part = _part(parameter.detach(), cut, stream.rank, stream.ranks, size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)


def _part(whole: Tensor, cut: Cut, rank: int, ranks: int, size: int) -> Tensor:
    parts = cut.parts(size, rank, ranks)
    return torch.cat([whole.narrow(cut.dim, s.start, s.stop - s.start) for s in parts], cut.dim)


def _pieces(
    part: Tensor, cut: Cut, stream: ResidualStream, size: int
) -> Iterator[tuple[slice, int, Tensor]]:
    """Of each section: its place in the whole, the ranks that have it, and the rank's values."""
    first = 0
    places = cut.parts(size, stream.rank, stream.ranks)
    sections = cut.sections or (Section(size),)
    for section, place in zip(sections, places, strict=True):
        length = place.stop - place.start
        copies = section.copies(stream.ranks) if cut.sections else 1
        yield place, copies, part.narrow(cut.dim, first, length)
        first += length


def _sum_copies(gradient: Tensor, *, cut: Cut, stream: ResidualStream) -> Tensor:
    """The gradient with the rows that several ranks have summed over these."""
    size = sum(section.rows for section in cut.sections)
    found = []
    for section, (_, copies, piece) in zip(
        cut.sections, _pieces(gradient, cut, stream, size), strict=True
    ):
        if copies > 1:
            # Zeros where other ranks have other heads: one collective of the whole group.
            whole = gradient.new_zeros(section.rows, *gradient.shape[1:])
            rows = section.part(stream.rank, stream.ranks)
            whole[rows] = piece
            piece = stream.reduced(whole)[rows]
        found.append(piece)
    return torch.cat(found)


def _summed(
    module: nn.Module, rules: list[tuple[str, Rule]], by_sequence: bool
) -> list[nn.Parameter]:
    """Parameters that every rank has, and of whose gradient each finds a part."""
    found = []
    for name, rule in rules:
        kind = KINDS[rule.kind]
        if kind.sums and (by_sequence or rule.kind == "heads"):
            own = module.get_submodule(name).named_parameters()
            found += [p for key, p in own if key not in kind.cuts]
    return list(dict.fromkeys(found))


Cuts = Mapping[str, tuple[Cut, int]]


def _column(module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts) -> None:
    cut, size = cuts[f"{name}.weight"]
    parts = cut.parts(size, stream.rank, stream.ranks)
    sections = tuple(part.stop - part.start for part in parts)
    module.set_submodule(name, ColumnParallelLinear(_get(module, name), stream, sections))


def _row(module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts) -> None:
    module.set_submodule(name, RowParallelLinear(_get(module, name), stream))


def _embedding(
    module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts
) -> None:
    first, size = _first_row(name, stream, cuts), cuts[f"{name}.weight"][1]
    embedding = VocabularyParallelEmbedding(_get(module, name), stream, first, size)
    module.set_submodule(name, embedding)


def _head(module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts) -> None:
    first, size = _first_row(name, stream, cuts), cuts[f"{name}.weight"][1]
    head = VocabularyParallelHead(_get(module, name), stream, first, size)
    module.set_submodule(name, head)
    parent = module.get_submodule(name.rpartition(".")[0])
    if hasattr(parent, "compute_loss"):
        parent.compute_loss = head.loss  # type: ignore[assignment]


def _split(module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts) -> None:
    def pre_hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (stream.split(arguments[0]), *arguments[1:])

    module.get_submodule(name).register_forward_pre_hook(pre_hook)


def _leave(module: nn.Module, name: str, rule: Rule, stream: ResidualStream, cuts: Cuts) -> None:
    """Nothing but its gradients differs from one process."""


Apply = Callable[[nn.Module, str, Rule, ResidualStream, Cuts], None]
APPLY: Mapping[str, Apply] = {
    "column": _column,
    "row": _row,
    "embedding": _embedding,
    "head": _head,
    "split": _split,
    "sequence": _leave,
    "heads": _leave,
}


def _get(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)


def _first_row(name: str, stream: ResidualStream, cuts: Cuts) -> int:
    cut, size = cuts[f"{name}.weight"]
    return cut.parts(size, stream.rank, stream.ranks)[0].start
