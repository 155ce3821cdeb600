"""Replaces parameters that tensor parallel cuts by each rank's part."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from stepgauge.parallel.tensor_parallel.layer_types import is_transposed
from stepgauge.parallel.tensor_parallel.rules import Rules
from stepgauge.spec.plan.tensor import Cut


@dataclasses.dataclass(frozen=True)
class CutParameter:
    """How a parameter is cut. `size` is the length of the whole parameter along the cut dim."""

    cut: Cut
    size: int
    rank: int
    ranks: int

    @property
    def dim(self) -> int:
        return self.cut.dim

    @property
    def slices(self) -> list[slice]:
        """The rank's slices of the whole parameter, one per section."""
        return self.cut.parts(self.size, self.rank, self.ranks)

    @property
    def copies(self) -> list[int]:
        """The number of ranks that have the same rows, for each section."""
        return [section.copies(self.ranks) for section in self.cut.sections] or [1]

    def part(self, whole: Tensor) -> Tensor:
        """Returns the rank's part of a tensor with the shape of the whole parameter."""
        pieces = [whole.narrow(self.dim, s.start, s.stop - s.start) for s in self.slices]
        return torch.cat(pieces, self.dim)

    def pieces(self, part: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
        """Splits the rank's part into sections. Yields for each its slice of the whole parameter, the
        number of ranks that have it, and its values.
        """
        lengths = [s.stop - s.start for s in self.slices]
        return zip(self.slices, self.copies, part.split(lengths, self.dim), strict=True)


Cuts = Mapping[str, CutParameter]  # by name of the parameter


def cut_parameters(module: nn.Module, rules: Rules, rank: int, ranks: int) -> Cuts:
    """Replaces each parameter that is cut by the rank's part. A parameter that occurs in several
    places stays one parameter.

    Raises ValueError for a parameter that cannot be cut, and for one that is cut differently, or not
    cut, in another place.
    """
    cuts: dict[str, CutParameter] = {}
    parts: dict[Tensor, tuple[str, nn.Parameter]] = {}  # whole -> its first name, and the part
    for layer, rule in rules:
        owner = module.get_submodule(layer)
        for key, whole in list(owner.named_parameters(recurse=False)):
            cut = rule.cut_of(key, whole.shape, is_transposed=is_transposed(owner))
            if cut is None:
                continue
            name = f"{layer}.{key}".lstrip(".")
            cuts[name] = CutParameter(cut, whole.shape[cut.dim], rank, ranks)
            first, _ = parts.setdefault(whole, (name, _part_of(name, whole, cuts[name])))
            if cuts[name].slices != cuts[first].slices or cut.dim != cuts[first].dim:
                raise _cut_differently(name, first)
    for name, whole in list(module.named_parameters(remove_duplicate=False)):
        if whole not in parts:
            continue
        first, part = parts[whole]
        if name not in cuts:
            raise _cut_differently(name, first)
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, part)
    return cuts


def _part_of(name: str, whole: Tensor, cut: CutParameter) -> nn.Parameter:
    try:
        part = cut.part(whole.detach()).clone()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _cut_differently(name: str, first: str) -> ValueError:
    return ValueError(
        f"{name} is the parameter {first}, which is cut; give its module a rule that cuts it in the "
        f"same way, or a separate parameter"
    )
