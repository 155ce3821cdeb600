"""Tensor-parallel communication during products (parallel/tensor_parallel/overlapped.py)."""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import Arithmetic, Term


def beside_products(
    collective: Term,
    phase: str,
    weight: tuple[int, int],
    tokens: int,
    ranks: int,
    arithmetic: Arithmetic,
) -> Iterator[Term]:
    """Yields the collective with the products that hide it, and the sum after a reduce-scatter.

    The product with a `weight` (outputs, inputs) runs in one piece per rank, and all pieces but one
    hide the collective. In backward, the weight-gradient product also hides a reduce-scatter, because
    it can run later. The second all-gather of a column layer's input, in backward, is hidden by both
    products, and left out here.
    """
    (n, k), rows, dtype = weight, tokens * (ranks - 1) // ranks, arithmetic.dtype
    is_scatter = collective.operation == "reduce_scatter"
    if phase == "forward":
        products = [Term("", f"matmul nt {dtype}", (rows, n, k))]
    else:
        products = [Term("", f"matmul nn {dtype}", (rows, k, n))]
        if is_scatter:
            products.append(Term("", f"matmul tn {dtype}", (n, k, tokens)))
    yield dataclasses.replace(collective, hidden_by=tuple(products))
    if is_scatter:  # compiled, the sum is fused, and only the other ranks' pieces are read extra
        piece = collective.sizes[0] / ranks
        name = f"{collective.name}.sum"
        yield from arithmetic.passes(name, piece, eager=ranks + 1, compiled=ranks - 1)
