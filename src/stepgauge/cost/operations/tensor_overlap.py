"""Tensor-parallel communication during products (parallel/tensor_parallel/overlapped.py)."""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.spec.plan.tensor import grouped


@dataclasses.dataclass(frozen=True)
class OverlappedLayer:
    """A column or row layer whose collectives run during its products. All are copies.

    weight    outputs, inputs
    tokens    of all ranks
    dtype     of the products
    replayed  the step is replayed from a CUDA graph
    """

    weight: tuple[int, int]
    tokens: int
    ranks: int
    dtype: str
    replayed: bool = False

    def terms(self, collective: Term, phase: str) -> Iterator[Term]:
        """Yields the collective of a phase with the products that hide it, and what goes with it.

        An all-gather is hidden by the product of the rank's own rows, and by those of all pieces but the
        last group, which arrive one after the other. A reduce-scatter is an all-to-all of the parts, and
        their sum in a pass of its own. In forward it begins after the first group of pieces, and is hidden
        by the others and the own piece; in backward, it is hidden by the product of the weight gradient.
        Before it, the column layer's input is gathered again, hidden by the product before. What is
        gathered for a weight gradient also needs a copy of the rank's own rows.
        """
        piece = self.tokens // self.ranks
        groups = grouped(range(1, self.ranks), rows=piece, replayed=self.replayed)
        gather = dataclasses.replace(collective, operation="all_gather", copied_as="all_gather")
        if collective.operation == "all_gather":
            hidden_by = self._product(phase, self.tokens - len(groups[-1]) * piece)
            yield dataclasses.replace(gather, hidden_by=(hidden_by,), waits=len(groups))
            if phase == "backward":
                yield self._own_rows(collective)
            return
        if phase == "forward":
            hidden_by = self._product(phase, self.tokens - len(groups[0]) * piece)
        else:
            again = dataclasses.replace(gather, name=f"{collective.name}.again")
            yield dataclasses.replace(again, hidden_by=(self._product(phase, self.tokens),))
            yield self._own_rows(collective)
            hidden_by = Term("", f"matmul tn {self.dtype}", (*self.weight, self.tokens))
        yield dataclasses.replace(collective, copied_as="all_to_all", hidden_by=(hidden_by,))
        nbytes = (self.ranks + 1) * collective.sizes[0] / self.ranks
        yield Term(f"{collective.name}.sum", TRAFFIC, (nbytes,))

    def _own_rows(self, collective: Term) -> Term:
        return Term(f"{collective.name}.own", TRAFFIC, (2 * collective.sizes[0] / self.ranks,))

    def _product(self, phase: str, rows: int) -> Term:
        n, k = self.weight
        if phase == "forward":
            return Term("", f"matmul nt {self.dtype}", (rows, n, k))
        return Term("", f"matmul nn {self.dtype}", (rows, k, n))
