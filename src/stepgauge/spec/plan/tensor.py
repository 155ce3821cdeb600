"""Tensor parallel as data: which parameter is cut along which dim, and which collective stands
where (Shoeybi et al. 2019; on a residual stream that is cut by sequence, Korthikanti et al. 2022).

A table gives modules, by the pattern of their names, a rule. `*` in a pattern stands for one part
of a name: "blocks.*.attention.input".

Legend: B batch, T sequence, D model width, N ranks.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows of a parameter that are cut into equal parts, one a rank.

    unit    rows that stay together, such as those of a head
    shared  where there are fewer units than ranks, neighbouring ranks have the same one: key heads
            that several query heads read
    """

    rows: int
    unit: int = 1
    shared: bool = False

    def copies(self, ranks: int) -> int:
        """Ranks that have the same rows. Raises ValueError where units and ranks do not divide."""
        units = self.rows // self.unit
        if units % ranks == 0:
            return 1
        if self.shared and ranks % units == 0:
            return ranks // units
        noun = "rows" if self.unit == 1 else f"units of {self.unit} rows"
        raise ValueError(f"{units} {noun} cannot be cut into {ranks} equal parts")

    def part(self, rank: int, ranks: int) -> slice:
        """The rank's rows, counted from the section's first."""
        copies = self.copies(ranks)
        size = self.rows * copies // ranks
        start = rank // copies * size
        return slice(start, start + size)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A parameter that is cut along `dim`, in each of its sections. Without sections the parts of
    the ranks are as equal as can be.
    """

    dim: int
    sections: tuple[Section, ...] = ()

    def parts(self, size: int, rank: int, ranks: int) -> list[slice]:
        """The rank's slices of a dim of that size, one a section. Raises ValueError for sections
        that cannot be cut, and where a rank would have nothing.
        """
        if not self.sections:
            if size < ranks:
                raise ValueError(f"{size} rows cannot be cut into {ranks} parts")
            return [slice(size * rank // ranks, size * (rank + 1) // ranks)]
        if (told := sum(section.rows for section in self.sections)) != size:
            raise ValueError(f"its sections have {told} rows, and it has {size}")
        slices, first = [], 0
        for section in self.sections:
            part = section.part(rank, ranks)
            slices.append(slice(first + part.start, first + part.stop))
            first += section.rows
        return slices


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a rule does to a module.

    cuts      the dim along which each of its parameters is cut, of a weight (outputs, inputs);
              others are whole on every rank
    forward   collectives of the residual stream in forward, and the same of backward
    sums      gradients of whole parameters are parts, of a piece of the sequence or of some heads:
              they are summed over ranks
    """

    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    sums: bool = False


# With a residual stream that is cut by sequence. Where it is whole an all-reduce takes the place of
# each reduce-scatter, and of the all-gather nothing.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        # A linear layer by rows: each rank has some outputs.
        "column": Kind(
            cuts={"weight": 0, "bias": 0}, forward=("all-gather",), backward=("reduce-scatter",)
        ),
        # A linear layer by columns: each rank has some inputs, and the outputs are summed.
        "row": Kind(
            cuts={"weight": 1}, forward=("reduce-scatter",), backward=("all-gather",), sums=True
        ),
        # An embedding by tokens. Its output is whole, for positions are added to it.
        "embedding": Kind(cuts={"weight": 0}, forward=("all-reduce",)),
        # The output matrix by tokens; logits are gathered only where someone asks for them.
        "head": Kind(
            cuts={"weight": 0, "bias": 0}, forward=("all-gather",), backward=("reduce-scatter",)
        ),
        # The first module on the residual stream takes its rank's piece of the sequence.
        "split": Kind(backward=("all-gather",)),
        # A module that only gives its first argument to its columns gathers it once for them all.
        "gather": Kind(forward=("all-gather",), backward=("reduce-scatter",)),
        # A module that works on its rank's piece of the sequence, or on its rank's heads.
        "sequence": Kind(sums=True),
        "heads": Kind(sums=True),
        # A module behind the first split that works on what every rank has whole.
        "whole": Kind(),
    }
)


# A piece that a rank sends another, from which on collectives beside products win. Layers 4096 wide
# on 2 x H200, forward and backward, eager: pieces of 32 MiB take 3 to 7 % less, of 16 MiB the widest
# takes 4 % less, and smaller ones are bound by the host, which has more to launch
# (docs/log/2026-11-22-tensor-parallel.md).
LEAST_OVERLAPPED_BYTES = 16 * 2**20


def overlaps(stream_bytes: int, ranks: int) -> bool:
    """Whether the collectives of a residual stream of so many bytes are large enough."""
    return stream_bytes // ranks >= LEAST_OVERLAPPED_BYTES


@dataclasses.dataclass(frozen=True)
class Count:
    """An attribute of a module that counts what is cut, and must say what a rank has.

    of   what it counts, such as heads
    per  of a quotient, what it divides by: query heads a key head
    """

    attribute: str
    of: Section
    per: Section | None = None

    def on(self, rank: int, ranks: int) -> int:
        """Its value on a rank. Raises ValueError for what cannot be cut into equal parts."""
        counted = _length(self.of.part(rank, ranks))
        return counted if self.per is None else counted // _length(self.per.part(rank, ranks))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of KINDS, and a column's sections; none: the rows are one of single rows.

    counts  attributes of the module that its forward reads
    """

    kind: str
    sections: tuple[Section, ...] = ()
    counts: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")

    def cut_of(
        self, parameter: str, shape: Sequence[int], *, is_transposed: bool = False
    ) -> Cut | None:
        """How the module's parameter of that shape is cut; None: it is whole.

        is_transposed  matrices of the module are (inputs, outputs), not (outputs, inputs)
        """
        dim = KINDS[self.kind].cuts.get(parameter)
        if dim is None:
            return None
        if is_transposed and len(shape) == 2:
            dim = 1 - dim
        by_tokens = self.kind in ("embedding", "head")
        return Cut(dim, () if by_tokens else self.sections or (Section(shape[dim]),))


Table = Mapping[str, Rule]


def is_by_sequence(table: Table) -> bool:
    """Whether the table has a residual stream of which each rank has a piece of the sequence."""
    return any(rule.kind in ("split", "sequence") for rule in table.values())


def is_named(name: str, pattern: str) -> bool:
    """Whether a module of that name is meant by a pattern of a table."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def matched(table: Table, names: Iterable[str]) -> Iterator[tuple[str, Rule]]:
    """Names with their rule, in the order of the names; a name may have several. Raises ValueError
    for a pattern that no name matches.
    """
    unused = set(table)
    for name in names:
        for pattern, rule in table.items():
            if is_named(name, pattern):
                unused.discard(pattern)
                yield name, rule
    if unused:
        raise ValueError(f"{min(unused)!r} is the name of no module")
