"""Attention in plain PyTorch: the equation itself, and FlashAttention-2's tiles.

Legend: B batch, H heads, T_q queries, T_k keys, D head width; `...` any leading dimensions, none
included.
"""

import math

import torch

from .visible import spans_of, visible

NO_SECOND_DERIVATIVE = (
    "flash_attention has no second derivative: "
    "use scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) for it"
)
_TILE = 128


def attention(q, k, v, *, is_causal=False, scale=None, window=0, cu_seqlens=None):
    """The oracle: `o = softmax(scale q k^T) v` with every score held, and the log-sum-exp of each
    row.

    Shapes: q (..., T_q, D), k and v (..., T_k, D); returns o (..., T_q, D) and lse (..., T_q).
    `scale` is 1/sqrt(D) if None. Causal: query i sees key j when i >= j, both counted from the
    first (torch's `is_causal`). With a window i sees j when |i - j| < window as well; with
    `cu_seqlens` (flash_attention_varlen's), only keys of its own sequence. Computes in the inputs' type: pass
    float64 for a reference value.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (q @ k.transpose(-1, -2))
    rows, cols = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    seen = visible(rows, cols, is_causal, window, _spans(cu_seqlens, q))
    scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


class FlashAttentionReference(torch.autograd.Function):
    """FlashAttention-2 (Dao 2023, algorithms 1 and 2) in plain PyTorch, on any device: no matrix of
    T_q x T_k is held.

    `.apply(q, k, v, is_causal=False, scale=None, window=0, cu_seqlens=None)` with q (..., T_q, D), k and v
    (..., T_k, D), the same leading dimensions; returns o (..., T_q, D). Saves q, k, v, o and the log-sum-exp (...,
    T_q), which is fp32 unless the inputs are float64. Causal: query i sees key j when i >= j, both
    counted from the first. Raises ValueError for shapes that do not fit.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None, window=0, cu_seqlens=None):
        check_shapes(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o, lse = forward(q, k, v, is_causal, scale, window, cu_seqlens)
        ctx.save_for_backward(q, k, v, o, lse, *(() if cu_seqlens is None else (cu_seqlens,)))
        ctx.options = is_causal, scale, window
        return o

    @staticmethod
    def backward(ctx, grad_o):
        q, k, v, o, lse, *packed = ctx.saved_tensors
        grads = _ReferenceBackward.apply(grad_o, q, k, v, o, lse, *ctx.options, *packed)
        return *grads, None, None, None, None


class _ReferenceBackward(torch.autograd.Function):
    """(dq, dk, dv). A function of its own, so that a second derivative raises."""

    @staticmethod
    def forward(ctx, *inputs):
        return backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def forward(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    """o and the log-sum-exp (..., T_q), tile by tile."""
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=_sum_dtype(q), device=q.device)
    seen = is_causal, window, _spans(cu_seqlens, q)
    for rows in _tiles(q.shape[-2]):
        o[..., rows, :], lse[..., rows] = _forward_tile(q, k, v, rows, scale, seen)
    return o, lse


def backward(grad_o, q, k, v, o, lse, is_causal, scale, window=0, cu_seqlens=None):
    """(dq, dk, dv) of these keys. o and lse may be those of more keys."""
    sums = _sum_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=sums, device=x.device) for x in (q, k, v))
    # rowsum(P * dP) = rowsum(o * grad_o): no pass over the keys is needed for it.
    delta = (o.to(sums) * grad_o.to(sums)).sum(dim=-1)
    seen = is_causal, window, _spans(cu_seqlens, q)
    for rows in _tiles(q.shape[-2]):
        q_tile, grad_tile = q[..., rows, :].to(sums), grad_o[..., rows, :].to(sums)
        for cols in _visible_tiles(k.shape[-2], rows, is_causal, window):
            k_tile, v_tile = k[..., cols, :].to(sums), v[..., cols, :].to(sums)
            scores = _scores(q_tile, k_tile, rows, cols, scale, seen)
            p = torch.exp(scores - lse[..., rows, None])
            dv[..., cols, :] += p.transpose(-1, -2) @ grad_tile
            dp = grad_tile @ v_tile.transpose(-1, -2)
            ds = scale * p * (dp - delta[..., rows, None])
            dq[..., rows, :] += ds @ k_tile
            dk[..., cols, :] += ds.transpose(-1, -2) @ q_tile
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward_tile(q, k, v, rows, scale, seen):
    """One tile of queries against all keys that it sees, with a running maximum and sum: (o, lse)
    of the tile.
    """
    sums = _sum_dtype(q)
    q_tile = q[..., rows, :].to(sums)
    o = torch.zeros_like(q_tile)
    # finite: a tile may hide all of a row's keys, and exp(-inf - maximum) must be zero
    lowest = torch.finfo(sums).min / 2
    maximum = torch.full(q_tile.shape[:-1], lowest, dtype=sums, device=q.device)
    total = torch.zeros_like(maximum)
    for cols in _visible_tiles(k.shape[-2], rows, *seen[:2]):
        scores = _scores(q_tile, k[..., cols, :].to(sums), rows, cols, scale, seen)
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        p = torch.exp(scores - new_maximum[..., None])
        shrink = torch.exp(maximum - new_maximum)
        total = shrink * total + p.sum(dim=-1)
        o = shrink[..., None] * o + p @ v[..., cols, :].to(sums)
        maximum = new_maximum
    return (o / total[..., None]).to(q.dtype), maximum + torch.log(total)


def _scores(q_tile, k_tile, rows, cols, scale, seen):
    scores = scale * (q_tile @ k_tile.transpose(-1, -2))
    is_causal, window, spans = seen
    if window or spans is not None or (is_causal and cols.stop - 1 > rows.start):
        row, col = (torch.arange(x.start, x.stop, device=scores.device) for x in (rows, cols))
        scores = scores.masked_fill(~visible(row, col, *seen), -math.inf)
    return scores


def _spans(cu_seqlens, q):
    return None if cu_seqlens is None else spans_of(cu_seqlens, q.shape[-2])


def _tiles(length):
    return [slice(start, min(start + _TILE, length)) for start in range(0, length, _TILE)]


def _visible_tiles(num_keys, rows, is_causal, window):
    ahead = 0 if is_causal else window - 1 if window else num_keys
    behind = window - 1 if window else rows.stop
    first, last = rows.start - behind, rows.stop - 1 + ahead
    return [cols for cols in _tiles(num_keys) if cols.start <= last and cols.stop > first]


def _sum_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_shapes(q, k, v):
    """Raises ValueError unless q (..., T_q, D) and k, v (..., T_k, D) agree in everything but T_q
    and T_k >= 1.
    """
    if q.ndim < 2 or k.ndim < 2:
        raise ValueError(
            f"attention takes q, k, v of (..., T, D), not q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    if k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must have one shape, "
            "and differ from q in the number of rows at most"
        )
    if k.shape[-2] == 0:
        raise ValueError(
            f"k {tuple(k.shape)} has no keys: the softmax over none is not defined; at least 1 is needed"
        )
