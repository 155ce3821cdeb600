"""Tensor parallel as data: along which dim each parameter is cut, and which collectives run where
(Shoeybi et al. 2019; with the residual stream cut by sequence, Korthikanti et al. 2022).

A table maps patterns of module names to rules. `*` in a pattern matches one part of a name, as in
"blocks.*.attention.input".
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

# Logits of which the loss over parts of the vocabulary has copies in fp32 at the same time.
MOST_COPIED_LOGITS = 2**26


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows of a parameter that are cut into equal parts, one per rank.

    unit    rows that stay together, such as the rows of one head
    shared  if there are fewer units than ranks, neighbouring ranks have the same unit; for key
            heads that several query heads read
    """

    rows: int
    unit: int = 1
    shared: bool = False

    def copies(self, ranks: int) -> int:
        """Returns how many ranks have the same rows. Raises ValueError if neither units nor ranks
        divide the other, or if the units are not shared.
        """
        units = self.rows // self.unit
        if units % ranks == 0:
            return 1
        if self.shared and ranks % units == 0:
            return ranks // units
        noun = "rows" if self.unit == 1 else f"units of {self.unit} rows"
        raise ValueError(f"{units} {noun} cannot be cut into {ranks} equal parts")

    def part_rows(self, ranks: int) -> int:
        """Returns the number of rows that each rank has."""
        return self.rows * self.copies(ranks) // ranks

    def part(self, rank: int, ranks: int) -> slice:
        """Returns the rank's rows, counted from the first row of the section."""
        size = self.part_rows(ranks)
        start = rank // self.copies(ranks) * size
        return slice(start, start + size)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along `dim`, separately in each of its sections. Without sections,
    ranks get parts whose sizes differ by at most one.
    """

    dim: int
    sections: tuple[Section, ...] = ()

    def parts(self, size: int, rank: int, ranks: int) -> list[slice]:
        """Returns the rank's slices of a dim of that size, one per section. Raises ValueError for
        sections that cannot be cut, and if a rank would get nothing.
        """
        if not self.sections:
            if size < ranks:
                raise ValueError(f"{size} rows cannot be cut into {ranks} parts")
            return [slice(size * rank // ranks, size * (rank + 1) // ranks)]
        if (rows := sum(section.rows for section in self.sections)) != size:
            raise ValueError(f"its sections have {rows} rows, and it has {size}")
        slices, first = [], 0
        for section in self.sections:
            part = section.part(rank, ranks)
            slices.append(slice(first + part.start, first + part.stop))
            first += section.rows
        return slices


@dataclasses.dataclass(frozen=True)
class Kind:
    """The effect of a rule on a module.

    cuts      parameter name -> dim along which it is cut, for a weight of shape (outputs, inputs);
              other parameters are whole on every rank
    forward   collectives on the residual stream in forward
    backward  collectives on the residual stream in backward
    sums      each rank's gradients of whole parameters cover only its piece of the sequence or its
              heads, so they are summed over ranks
    """

    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    sums: bool = False


# These collectives are for a residual stream cut by sequence. If the stream is whole, an all-reduce
# replaces each reduce-scatter, and the all-gathers are not needed.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        # A linear layer cut by rows of its weight: each rank has some outputs.
        "column": Kind(
            cuts={"weight": 0, "bias": 0}, forward=("all-gather",), backward=("reduce-scatter",)
        ),
        # A linear layer cut by columns of its weight: each rank has some inputs, and the outputs of
        # all ranks are summed.
        "row": Kind(
            cuts={"weight": 1}, forward=("reduce-scatter",), backward=("all-gather",), sums=True
        ),
        # An embedding cut by vocabulary. Its output is whole because positions are added to it.
        "embedding": Kind(cuts={"weight": 0}, forward=("all-reduce",)),
        # The output matrix cut by vocabulary. Logits are gathered only if the caller needs them.
        "head": Kind(
            cuts={"weight": 0, "bias": 0}, forward=("all-gather",), backward=("reduce-scatter",)
        ),
        # The first module on the residual stream: its input is cut to the rank's piece.
        "split": Kind(backward=("all-gather",)),
        # A module that passes its first argument only to column layers gathers it once for all.
        "gather": Kind(forward=("all-gather",), backward=("reduce-scatter",)),
        # A module that works on the rank's piece of the stream, or on the rank's heads.
        "sequence": Kind(sums=True),
        "heads": Kind(sums=True),
        # A module behind the first split whose input is whole on every rank.
        "whole": Kind(),
    }
)


# Rules of these kinds cut the residual stream.
STREAM_KINDS = ("split", "sequence")

# The smallest piece, sent from one rank to another, for which overlapping collectives with products
# pays. Time of overlap relative to plain collectives, layers 4096 wide, forward and backward:
#   two H200s, single layers, eager   pieces of 32 MiB -3 to -7 %; 16 MiB -4 %, the widest layer
#   four H100s, compiled blocks       pieces of 64 MiB -13 %; 16 MiB +8 to +11 %
#   four H200s, the same              16 MiB +5 to +20 %, because the host launches too slowly;
#                                     replayed from a CUDA graph -7 %
# (docs/log/2026-11-22-tensor-parallel.md, 2026-11-28-four-gpus.md, 2026-11-28-graphs-and-lanes.md).
LEAST_OVERLAPPED_BYTES = 32 * 2**20
LEAST_REPLAYED_BYTES = 16 * 2**20


def overlaps(stream_bytes: int, ranks: int, *, replayed: bool = False) -> bool:
    """True if the collectives of a residual stream of that size are large enough to overlap.

    replayed  the step is replayed from a CUDA graph
    """
    least = LEAST_REPLAYED_BYTES if replayed else LEAST_OVERLAPPED_BYTES
    return stream_bytes // ranks >= least


# Pieces of fewer rows are multiplied together: a product of 2048 rows leaves many multiprocessors
# idle while its last tiles are computed, and the host takes longer to launch it than the GPU to run it.
LEAST_ROWS = 4096


def grouped(ranks: Sequence[int], *, rows: int, replayed: bool = False) -> list[range]:
    """Returns the ranks in the same order, in groups whose pieces are multiplied by one product: ranks
    next to each other, until their pieces of `rows` rows make LEAST_ROWS.

    replayed  the products are part of a CUDA graph, where launches are cheap: each rank is a group, so
              that messages begin earlier, and on all ranks at the same time
              (docs/log/2026-11-28-pushed-rows.md)
    """
    if replayed:
        return [range(rank, rank + 1) for rank in ranks]
    groups: list[range] = []
    for rank in ranks:
        last = groups[-1] if groups else range(0)
        if rank in (last.start - 1, last.stop) and 0 < len(last) * rows < LEAST_ROWS:
            groups[-1] = range(min(rank, last.start), max(rank + 1, last.stop))
        else:
            groups.append(range(rank, rank + 1))
    return groups


@dataclasses.dataclass(frozen=True)
class Count:
    """An attribute of a module that holds a count, such as the number of heads, and must be set to
    the count of one rank.

    of   the section that is counted, with one row per head for example
    per  if the attribute is a quotient, the section of its divisor: "query heads per key head"
    """

    attribute: str
    of: Section
    per: Section | None = None

    def value(self, ranks: int) -> int:
        """Returns the attribute's value on each of `ranks` ranks. Raises ValueError if the section
        cannot be cut into equal parts.
        """
        divisor = 1 if self.per is None else self.per.part_rows(ranks)
        return self.of.part_rows(ranks) // divisor


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one module is parallelized.

    kind      a key of KINDS
    sections  of the weight's rows, for "column"; empty: one section of all rows with a unit of 1
    counts    attributes that the module's forward reads and that must be set per rank
    by_token  for "split" and "sequence": the residual stream treats every token alike, whichever
              sequence it is in. Ranks then take the batch's tokens in order, without regard to
              sequences, so that every rank's tokens lie next to each other in memory
    """

    kind: str
    sections: tuple[Section, ...] = ()
    counts: tuple[Count, ...] = ()
    by_token: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.by_token and self.kind not in STREAM_KINDS:
            raise ValueError(f"by_token is for the kinds {' and '.join(STREAM_KINDS)}")

    def cut_of(
        self, parameter: str, shape: Sequence[int], *, is_transposed: bool = False
    ) -> Cut | None:
        """Returns how the module's parameter of that shape is cut; None if it stays whole.

        is_transposed  the module's matrices are (inputs, outputs) instead of (outputs, inputs)
        """
        dim = KINDS[self.kind].cuts.get(parameter)
        if dim is None:
            return None
        if is_transposed and len(shape) == 2:
            dim = 1 - dim
        if self.kind in ("embedding", "head"):  # a vocabulary need not be a multiple of the ranks
            return Cut(dim)
        return Cut(dim, self.sections or (Section(shape[dim]),))


Table = Mapping[str, Rule]


def is_by_sequence(*tables: Table) -> bool:
    """True if, with these tables of the stages of a network, each rank has only a piece of the sequence in
    the residual stream.
    """
    return bool(_stream_rules(tables))


def is_by_token(*tables: Table) -> bool:
    """True if, with these tables, ranks take the batch's tokens in order: all rules must say so."""
    rules = _stream_rules(tables)
    return bool(rules) and all(rule.by_token for rule in rules)


def _stream_rules(tables: Iterable[Table]) -> list[Rule]:
    return [rule for table in tables for rule in table.values() if rule.kind in STREAM_KINDS]


def is_named(name: str, pattern: str) -> bool:
    """True if a table's pattern matches the name of a module."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def matched(table: Table, names: Iterable[str]) -> Iterator[tuple[str, Rule]]:
    """Yields each name with each rule that matches it, in the order of the names. Raises ValueError
    for a pattern that matches no name.
    """
    unused = set(table)
    for name in names:
        for pattern, rule in table.items():
            if is_named(name, pattern):
                unused.discard(pattern)
                yield name, rule
    if unused:
        raise ValueError(f"{min(unused)!r} matches no module")
