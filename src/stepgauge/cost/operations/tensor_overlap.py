"""Collectives that run beside products, as parallel/tensor_parallel/overlapped.py does them."""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import Arithmetic, Term


def beside_products(
    collective: Term, phase: str, weight: tuple[int, int], tokens: int, ranks: int, how: Arithmetic
) -> Iterator[Term]:
    """The collective with the products that hide it, of a weight (outputs, inputs) of this rank,
    and the sum of what a reduce-scatter brings.

    What hides it is the product of all pieces but one, and in backward the product that is the
    weight's gradient, which a reduce-scatter need not precede. The second all-gather of a column's
    input, in backward, hides behind both and is left out.
    """
    (n, k), rows = weight, tokens * (ranks - 1) // ranks
    if phase == "forward":
        products = [Term("", f"matmul nt {how.type}", (rows, n, k))]
    else:
        products = [Term("", f"matmul nn {how.type}", (rows, k, n))]
    scatters = collective.operation == "reduce_scatter"
    if phase == "backward" and scatters:
        products.append(Term("", f"matmul tn {how.type}", (n, k, tokens)))
    yield dataclasses.replace(collective, beside=tuple(products))
    if scatters:  # compiled, it is fused: the pieces of the other ranks are read besides
        piece = collective.sizes[0] / ranks
        yield from how.passes(f"{collective.name}.sum", piece, eager=ranks + 1, compiled=ranks - 1)
