"""What the kernels of linear + cross-entropy share: functions of a tile that lose no digits.

Legend: V vocabulary, D model width.
"""

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """log(1 + x), 0 <= x <= 1, right where 1 + x rounds to 1 (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _sech2(x):
    """1 - tanh(x)^2 without the subtraction, which leaves nothing of a saturated cap."""
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
    """The target's logit and its slope by the uncapped one."""
    slope = 1.0
    if HAS_SOFTCAP:
        slope = _sech2(dot / softcap)
        dot = softcap * _tanh(dot / softcap)
    # There is no error to raise from here: a target outside the vocabulary makes its row NaN.
    return tl.where(in_range, dot, float("nan")), slope


@triton.jit
def _loss_of(others, target_logit):
    """Cross-entropy, log-sum-exp, probability of the other classes together and of the target.

    x = (log-sum-exp of the other classes) - (target's logit), so that loss = softplus(x) and the
    target's probability less one = -sigmoid(x): neither subtracts two numbers near one another,
    however confident the row.
    """
    x = others - target_logit
    t = tl.exp(-tl.abs(x))
    cross_entropy = tl.maximum(x, 0.0) + _log1p(t)
    p_others = tl.where(x >= 0, 1.0, t) / (1.0 + t)
    p_target = tl.where(x >= 0, t, 1.0) / (1.0 + t)
    return cross_entropy, target_logit + cross_entropy, p_others, p_target


@triton.jit
def _finite(maximum):
    """What exponents are relative to; 0 for minus infinity, where inf - inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
