"""Tensor-parallel communication during products (parallel/tensor_parallel/overlapped.py)."""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.spec.plan.tensor import grouped


def beside_products(
    collective: Term,
    phase: str,
    weight: tuple[int, int],
    tokens: int,
    ranks: int,
    arithmetic: Arithmetic,
) -> Iterator[Term]:
    """Yields the collective with the products that hide it, and the sum after a reduce-scatter.

    The products have a `weight` (outputs, inputs). An all-gather is hidden by the product of the rank's
    own rows, since the pieces of all other ranks arrive at the same time. A reduce-scatter in forward
    begins after the first group of pieces, and is hidden by the others and the own piece; in backward,
    it is hidden by the product of the weight gradient. The second all-gather of a column layer's input,
    in backward, is hidden by both products, and left out here.

    Both are copies (parallel/tensor_parallel/exchange.py). A reduce-scatter is an all-to-all of the parts,
    and their sum.
    """
    (n, k), dtype, piece = weight, arithmetic.dtype, tokens // ranks
    is_scatter = collective.operation == "reduce_scatter"
    if is_scatter and phase == "backward":
        product = Term("", f"matmul tn {dtype}", (n, k, tokens))
    else:
        rows = (
            tokens - len(grouped(range(1, ranks), rows=piece)[0]) * piece if is_scatter else piece
        )
        sizes = (rows, n, k) if phase == "forward" else (rows, k, n)
        product = Term("", f"matmul {'nt' if phase == 'forward' else 'nn'} {dtype}", sizes)
    copied = "all_to_all" if is_scatter else "all_gather"
    yield dataclasses.replace(collective, hidden_by=(product,), copied=copied)
    if is_scatter:  # compiled, the sum is fused, and only the other ranks' pieces are read extra
        numel = collective.sizes[0] / ranks
        name = f"{collective.name}.sum"
        yield from arithmetic.passes(name, numel, eager=ranks + 1, compiled=ranks - 1)
