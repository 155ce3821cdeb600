"""Parameters that tensor parallel cuts: which, and each rank's part in the place of the whole."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from stepgauge.parallel.tensor_parallel.layer_types import is_transposed
from stepgauge.parallel.tensor_parallel.rules import Rules
from stepgauge.spec.plan.tensor import Cut


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


def cut_parameters(module: nn.Module, rules: Rules, rank: int, ranks: int) -> Cuts:
    """Puts the rank's part in the place of each parameter that is cut. What is one parameter stays
    one. Raises ValueError for what cannot be cut, and for a parameter that is also elsewhere.
    """
    cuts: dict[str, CutParameter] = {}
    parts: dict[Tensor, tuple[str, nn.Parameter]] = {}  # with the first name of the whole
    for layer, rule in rules:
        owner = module.get_submodule(layer)
        for key, whole in list(owner.named_parameters(recurse=False)):
            cut = rule.cut_of(key, whole.shape, is_transposed=is_transposed(owner))
            if cut is None:
                continue
            name = f"{layer}.{key}".lstrip(".")
            cuts[name] = CutParameter(cut, whole.shape[cut.dim], rank, ranks)
            first, _ = parts.setdefault(whole, (name, _part_of(name, whole, cuts[name])))
            if cuts[name].places != cuts[first].places or cut.dim != cuts[first].dim:
                raise _cut_elsewhere(name, first)
    for name, whole in list(module.named_parameters(remove_duplicate=False)):
        if whole not in parts:
            continue
        first, part = parts[whole]
        if name not in cuts:
            raise _cut_elsewhere(name, first)
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, part)
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
