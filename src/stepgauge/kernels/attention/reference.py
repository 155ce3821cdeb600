"""Attention in plain PyTorch: the equation itself (the oracle), and FlashAttention-2 tile by tile.

Legend: B batch, H heads, T_q queries, T_k keys, D head width; `...` any leading dimensions, or
none.
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
    """Returns `o = softmax(scale q k^T) v` and the log-sum-exp of each row of scores. It is the
    oracle, and holds all scores.

    Shapes: q (..., T_q, D), k and v (..., T_k, D); returns o (..., T_q, D) and lse (..., T_q).
    `scale` is 1/sqrt(D) if None. Causal: query i sees key j when i >= j, both counted from the
    first (torch's `is_causal`). A window adds the condition |i - j| < window. With `cu_seqlens`, as
    in flash_attention_varlen, a query sees only keys of its own sequence. Computes in the inputs'
    type: pass float64 for a reference value.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (q @ k.transpose(-1, -2))
    rows, cols = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    is_visible = visible(rows, cols, is_causal, window, _spans(cu_seqlens, q))
    scores = scores.masked_fill(~is_visible, -math.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


class FlashAttentionReference(torch.autograd.Function):
    """FlashAttention-2 (Dao 2023, algorithms 1 and 2) in plain PyTorch, on any device. It holds no
    T_q x T_k matrix.

    `.apply(q, k, v, is_causal=False, scale=None, window=0, cu_seqlens=None)` with q (..., T_q, D)
    and k, v (..., T_k, D), all with the same leading dimensions; returns o (..., T_q, D). Saves q,
    k, v, o and the log-sum-exp (..., T_q) for backward; the log-sum-exp is fp32 unless the inputs
    are float64. Causal: query i sees key j when i >= j, both counted from the first. Raises
    ValueError for shapes that do not fit.
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
    """Returns (dq, dk, dv). A separate autograd function, so that a second derivative raises."""

    @staticmethod
    def forward(ctx, *inputs):
        return backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def forward(q, k, v, is_causal, scale, window=0, cu_seqlens=None):
    """Computes o and the log-sum-exp (..., T_q) tile by tile."""
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=_sum_dtype(q), device=q.device)
    mask = is_causal, window, _spans(cu_seqlens, q)
    for rows in _tiles(q.shape[-2]):
        o[..., rows, :], lse[..., rows] = _forward_tile(q, k, v, rows, scale, mask)
    return o, lse


def backward(grad_o, q, k, v, o, lse, is_causal, scale, window=0, cu_seqlens=None):
    """Returns what these keys contribute to dq, and their dk and dv. o and lse may come from
    attention over more keys than these (ring attention).
    """
    sums = _sum_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=sums, device=x.device) for x in (q, k, v))
    # delta = rowsum(P * dP) equals rowsum(o * grad_o), which needs no pass over the keys.
    delta = (o.to(sums) * grad_o.to(sums)).sum(dim=-1)
    mask = is_causal, window, _spans(cu_seqlens, q)
    for rows in _tiles(q.shape[-2]):
        q_tile, grad_tile = q[..., rows, :].to(sums), grad_o[..., rows, :].to(sums)
        for cols in _visible_tiles(k.shape[-2], rows, is_causal, window):
            k_tile, v_tile = k[..., cols, :].to(sums), v[..., cols, :].to(sums)
            scores = _scores(q_tile, k_tile, rows, cols, scale, mask)
            p = torch.exp(scores - lse[..., rows, None])
            dv[..., cols, :] += p.transpose(-1, -2) @ grad_tile
            dp = grad_tile @ v_tile.transpose(-1, -2)
            ds = scale * p * (dp - delta[..., rows, None])
            dq[..., rows, :] += ds @ k_tile
            dk[..., cols, :] += ds.transpose(-1, -2) @ q_tile
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward_tile(q, k, v, rows, scale, mask):
    """Returns (o, lse) of one tile of queries, with a running maximum and sum over the tiles of
    keys that it sees.
    """
    sums = _sum_dtype(q)
    q_tile = q[..., rows, :].to(sums)
    o = torch.zeros_like(q_tile)
    # Finite, because a tile may mask all of a row's keys, and exp(-inf - maximum) must then be
    # zero.
    lowest = torch.finfo(sums).min / 2
    maximum = torch.full(q_tile.shape[:-1], lowest, dtype=sums, device=q.device)
    total = torch.zeros_like(maximum)
    for cols in _visible_tiles(k.shape[-2], rows, *mask[:2]):
        scores = _scores(q_tile, k[..., cols, :].to(sums), rows, cols, scale, mask)
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        p = torch.exp(scores - new_maximum[..., None])
        shrink = torch.exp(maximum - new_maximum)
        total = shrink * total + p.sum(dim=-1)
        o = shrink[..., None] * o + p @ v[..., cols, :].to(sums)
        maximum = new_maximum
    return (o / total[..., None]).to(q.dtype), maximum + torch.log(total)


def _scores(q_tile, k_tile, rows, cols, scale, mask):
    scores = scale * (q_tile @ k_tile.transpose(-1, -2))
    is_causal, window, spans = mask
    if window or spans is not None or (is_causal and cols.stop - 1 > rows.start):
        row, col = (torch.arange(x.start, x.stop, device=scores.device) for x in (rows, cols))
        scores = scores.masked_fill(~visible(row, col, *mask), -math.inf)
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
    """Raises ValueError unless q is (..., T_q, D), and k and v are (..., T_k, D) with the same
    leading dimensions and T_k >= 1.
    """
    if q.ndim < 2 or k.ndim < 2:
        raise ValueError(
            f"attention takes q, k, v of shape (..., T, D), not q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    if k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must have the same "
            "shape, which may differ from q's only in the number of rows"
        )
    if k.shape[-2] == 0:
        raise ValueError(f"k {tuple(k.shape)} has no keys: softmax needs at least 1")
