"""Tensor-parallel communication during products (parallel/tensor_parallel/overlapped.py)."""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.spec.plan.tensor import grouped


def beside_products(
    collective: Term,
    phase: str,
    weight: tuple[int, int],
    tokens: int,
    ranks: int,
    arithmetic: Arithmetic,
    *,
    replayed: bool = False,
) -> Iterator[Term]:
    """Yields the collective with the products that hide it, and what goes with it.

    The products have a `weight` (outputs, inputs). An all-gather is hidden by the product of the rank's
    own rows, since the pieces of all other ranks arrive at the same time. A reduce-scatter in forward
    begins after the first group of pieces, and is hidden by the others and the own piece; in backward,
    it is hidden by the product of the weight gradient. Before it, the column layer's input is gathered
    again, hidden by the product before.

    `replayed`: the step is replayed from a CUDA graph.

    All are copies (parallel/tensor_parallel/exchange.py). A reduce-scatter is an all-to-all of the parts, and
    their sum in a pass of its own.
    """
    (n, k), dtype, piece = weight, arithmetic.dtype, tokens // ranks
    layout, sizes = ("nt", (n, k)) if phase == "forward" else ("nn", (k, n))

    def product(rows: int) -> Term:
        return Term("", f"matmul {layout} {dtype}", (rows, *sizes))

    gather = dataclasses.replace(collective, operation="all_gather", copied="all_gather")
    if collective.operation == "all_gather":
        yield dataclasses.replace(gather, hidden_by=(product(piece),))
        return
    scatter = dataclasses.replace(collective, copied="all_to_all")
    if phase == "forward":
        first, *_ = grouped(range(1, ranks), rows=piece, replayed=replayed)
        rows = tokens - len(first) * piece
        yield dataclasses.replace(scatter, hidden_by=(product(rows),))
    else:
        again = dataclasses.replace(gather, name=f"{collective.name}.again")
        yield dataclasses.replace(again, hidden_by=(product(tokens),))
        weights = Term("", f"matmul tn {dtype}", (n, k, tokens))
        yield dataclasses.replace(scatter, hidden_by=(weights,))
    nbytes = (ranks + 1) * collective.sizes[0] / ranks
    yield Term(f"{collective.name}.sum", TRAFFIC, (nbytes,))
