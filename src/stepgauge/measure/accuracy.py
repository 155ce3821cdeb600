"""Relative errors of results, and the largest error that is accepted."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype, reduction: int) -> float:
    """Returns the largest relative error in norm that is accepted:
    `4 eps(dtype) + 4 eps(fp32) sqrt(reduction)`, and 0 for integers.

    A result is rounded to its dtype once, and to narrower intermediates a few times. The error of a
    sum in fp32 grows like a random walk over its `reduction` terms.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * math.sqrt(reduction)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Returns |value - exact| / |exact|. It is 0 if both are zero and NaN if the value has a NaN. An
    infinity has no error if the exact value is the same infinity.
    """
    value, exact = (_to_64_bits(x.detach()) for x in (value, exact))
    size = exact.norm().item()
    if math.isinf(size):
        size = exact.masked_fill(exact.isinf(), 0).norm().item()
        is_equal = value == exact
        value = value.masked_fill(is_equal, 0)
        exact = exact.masked_fill(is_equal, 0)
    error = (value - exact).norm().item()
    return 0.0 if error == 0 else error / max(size, torch.finfo(torch.float64).tiny)


def _to_64_bits(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def largest(errors: Iterable[float]) -> float:
    """Returns the largest error, or NaN if one is NaN."""
    errors = list(errors)
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def largest_error(exact: Sequence[Tensor], results: Sequence[Tensor]) -> float:
    """Returns the largest relative error of the results."""
    return largest([relative_error(a, b) for a, b in zip(results, exact, strict=True)])
