"""How wrong a result is, and how wrong it may be."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype, reduction: int) -> float:
    """Largest relative error in norm that is called right: `4 eps(dtype) + 4 eps(fp32)
    sqrt(reduction)`.

    A result is rounded to its type once and to narrower intermediates a few times; what is summed
    in fp32 errs like a random walk over the `reduction` terms. Whole numbers must be equal: 0.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * math.sqrt(reduction)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """|value - exact| / |exact|, 0 where both are zero; NaN where the value has one. An infinity is
    right where the exact one is the same.
    """
    value, exact = (_wide(x.detach()) for x in (value, exact))
    size = exact.norm().item()
    if math.isinf(size):
        size = exact.masked_fill(exact.isinf(), 0).norm().item()
        is_right = value == exact
        value = value.masked_fill(is_right, 0)
        exact = exact.masked_fill(is_right, 0)
    error = (value - exact).norm().item()
    return 0.0 if error == 0 else error / max(size, torch.finfo(torch.float64).tiny)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def largest(errors: Iterable[float]) -> float:
    """The largest, NaN if any is."""
    known = list(errors)
    return math.nan if any(math.isnan(error) for error in known) else max(known)


def largest_error(exact: Sequence[Tensor], results: Sequence[Tensor]) -> float:
    """The largest relative error of any of the results."""
    return largest([relative_error(a, b) for a, b in zip(results, exact, strict=True)])
