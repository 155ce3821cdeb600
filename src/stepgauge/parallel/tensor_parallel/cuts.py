"""Parameters that tensor parallel cuts: which, and each rank's part in the place of the whole."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.spec.plan.tensor import KINDS, Cut, Rule, Table, matched

Rules = Sequence[tuple[str, Rule]]


@dataclasses.dataclass(frozen=True)
class CutParameter:
    """How a parameter is cut that has `size` rows (of a cut along dim 1, columns) as a whole."""

    cut: Cut
    size: int
    rank: int
    ranks: int

    @property
    def dim(self) -> int:
        return self.cut.dim

    @property
    def places(self) -> list[slice]:
        """The rank's part of the whole, one slice a section."""
        return self.cut.parts(self.size, self.rank, self.ranks)

    @property
    def copies(self) -> list[int]:
        """Of each section, the ranks that have the same rows."""
        return [section.copies(self.ranks) for section in self.cut.sections] or [1]

    def part(self, whole: Tensor) -> Tensor:
        pieces = [whole.narrow(self.dim, s.start, s.stop - s.start) for s in self.places]
        return torch.cat(pieces, self.dim)

    def pieces(self, part: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
        """Of each section: its place in the whole, the ranks that have it, and the rank's values."""
        lengths = [place.stop - place.start for place in self.places]
        return zip(self.places, self.copies, part.split(lengths, self.dim), strict=True)


Cuts = Mapping[str, CutParameter]  # by the parameter's name
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
LAYERS: Mapping[str, Any] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "head": nn.Linear,
    "embedding": nn.Embedding,
}


def rules_of(module: nn.Module, table: Table, *, by_sequence: bool) -> Rules:
    """The rules of the table by the names of the module's parts. Raises ValueError for what would
    not be computed as in one process.
    """
    rules = list(matched(table, [name for name, _ in module.named_modules()]))
    for name, rule in rules:
        _check_layer(name, module.get_submodule(name), rule)
    for name, each in module.named_modules():
        if isinstance(each, DROPOUTS) and each.p:
            raise ValueError(
                f"{name} drops {each.p} of what it is given, other values on each rank; set its p "
                f"to 0"
            )
    names = {rule.kind: name for name, rule in rules}
    if by_sequence and "embedding" in names and "split" not in names:
        raise ValueError(
            f"by_sequence is True, and the table cuts the embedding {names['embedding']} and splits "
            f"nothing; give the first module of the residual stream the rule split, or choose "
            f"by_sequence=False"
        )
    return rules


def _check_layer(name: str, layer: Any, rule: Rule) -> None:
    """Raises ValueError for a layer that is not the one that the rule cuts."""
    wanted = LAYERS.get(rule.kind)
    if wanted is None:
        return
    cuts = f"the rule {rule.kind} cuts nn.{wanted.__name__}"
    if not isinstance(layer, wanted):
        raise ValueError(f"{name} is a {type(layer).__name__}; {cuts}")
    if type(layer).forward is not wanted.forward:
        raise ValueError(f"{name} is a {type(layer).__name__} with a forward of its own; {cuts}")
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise ValueError(f"{name} has no parameter weight of its own to cut")
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(layer, option, False):
            raise ValueError(f"{name} has {option}, which an embedding that is cut does not do")


def cut_parameters(module: nn.Module, rules: Rules, rank: int, ranks: int) -> Cuts:
    """Puts the rank's part in the place of each parameter that is cut. What is one parameter stays
    one. Raises ValueError for what cannot be cut, and for a parameter that is also elsewhere.
    """
    cuts: dict[str, CutParameter] = {}
    parts: dict[Tensor, tuple[str, nn.Parameter]] = {}  # with the first name of the whole
    for layer, rule in rules:
        for key, whole in list(module.get_submodule(layer).named_parameters(recurse=False)):
            dim = KINDS[rule.kind].cuts.get(key)
            if dim is None:
                continue
            name = f"{layer}.{key}".lstrip(".")
            cut = rule.cut_of(key, whole.shape[dim])
            assert cut is not None, "a dim has a cut"
            cuts[name] = CutParameter(cut, whole.shape[dim], rank, ranks)
            first, _ = parts.setdefault(whole, (name, _part_of(name, whole, cuts[name])))
            if cuts[name].places != cuts[first].places or dim != cuts[first].dim:
                raise _cut_elsewhere(name, first)
    for name, whole in list(module.named_parameters(remove_duplicate=False)):
        if whole not in parts:
            continue
        first, part = parts[whole]
        if name not in cuts:
            raise _cut_elsewhere(name, first)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, part)
    return cuts


def _part_of(name: str, whole: Tensor, cut: CutParameter) -> nn.Parameter:
    try:
        part = cut.part(whole.detach()).clone()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _cut_elsewhere(name: str, first: str) -> ValueError:
    return ValueError(
        f"{name} is the parameter {first}, which is cut; give its module a rule that cuts it alike, "
        f"or a parameter of its own"
    )
