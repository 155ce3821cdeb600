"""Numerically stable functions that the kernels of linear + cross-entropy share.

Legend: V vocabulary, D model width.
"""

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """Returns log(1 + x) for 0 <= x <= 1, accurate also where 1 + x rounds to 1 (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _sech2(x):
    """Returns 1 - tanh(x)^2 without the subtraction, which would lose all digits for large |x|."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _dot_rows(a_ptr, stride_a, b_ptr, stride_b, begin, end, BLOCK_D: tl.constexpr):
    sums = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(begin, end, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)
        a = tl.load(a_ptr + d * stride_a, mask=d < end, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + d * stride_b, mask=d < end, other=0.0).to(tl.float32)
        sums += a * b
    return tl.sum(sums, axis=0)


@triton.jit
def _target_logit(dot, in_range, softcap, HAS_SOFTCAP: tl.constexpr):
    """Returns the target's logit and its derivative with respect to the uncapped logit."""
    slope = 1.0
    if HAS_SOFTCAP:
        slope = _sech2(dot / softcap)
        dot = softcap * _tanh(dot / softcap)
    # A kernel cannot raise an error, so a target outside the vocabulary makes its row NaN.
    return tl.where(in_range, dot, float("nan")), slope


@triton.jit
def _loss_of(others, target_logit):
    """Returns the cross-entropy, the log-sum-exp, the total probability of the other classes, and
    the target's probability.

    With x = (log-sum-exp of the other classes) - (target's logit), loss = softplus(x) and the
    target's probability minus one = -sigmoid(x). Neither subtracts two nearly equal numbers, even
    for a very confident prediction.
    """
    x = others - target_logit
    t = tl.exp(-tl.abs(x))
    cross_entropy = tl.maximum(x, 0.0) + _log1p(t)
    p_others = tl.where(x >= 0, 1.0, t) / (1.0 + t)
    p_target = tl.where(x >= 0, t, 1.0) / (1.0 + t)
    return cross_entropy, target_logit + cross_entropy, p_others, p_target


@triton.jit
def _finite(maximum):
    """Returns the maximum to subtract from exponents, or 0 if it is minus infinity, because inf -
    inf would be NaN.
    """
    return tl.where(maximum == float("-inf"), 0.0, maximum)
