"""Which keys a query sees: the causal mask, a sliding window, sequences packed one after another.

Legend: T tokens, T_q queries, T_k keys, S sequences. `spans` is (2, T) int32: where each token's
sequence begins (row 0) and ends (row 1).
"""

import torch
from torch import Tensor


def visible(rows, cols, is_causal, window=0, spans=None) -> Tensor:
    """Returns a (queries, keys) mask, True where query `rows[i]` sees key `cols[j]`."""
    distance = rows[:, None] - cols[None, :]
    mask = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        mask = mask & (distance.abs() < window)
    if spans is not None:
        begins = spans[0]
        mask = mask & (begins[rows][:, None] == begins[cols][None, :])
    return mask


def num_pairs(num_queries: int, num_keys: int, is_causal, window=0, cu_seqlens=None) -> int:
    """Counts the pairs of a query and a key whose score is computed, by torch's convention: a
    causal mask alone does not reduce the count, a window and packed sequences do. `cu_seqlens` on
    the meta device have no values and do not reduce it.
    """
    begins, ends = torch.zeros(num_queries, dtype=torch.long), torch.tensor(num_keys)
    if type(cu_seqlens) is Tensor and not cu_seqlens.is_meta:
        begins, ends = spans_of(cu_seqlens.cpu(), num_queries).long()
    if not window:
        return int((ends - begins).sum())
    queries = torch.arange(num_queries)
    last = (queries if is_causal else queries + window - 1).minimum(ends - 1)
    return int((last - (queries - window + 1).maximum(begins) + 1).sum())


def check_window(num_queries: int, num_keys: int, window: int) -> None:
    """Raises ValueError for an invalid window, and for one that leaves a query without any key."""
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window {window}: expected 0 (no window) or a positive number of keys")
    if window and num_queries - num_keys >= window:
        raise ValueError(
            f"window {window} with {num_queries} queries and {num_keys} keys: the last query sees "
            f"none of them; the window must be larger than {num_queries - num_keys}"
        )


def spans_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Returns the `spans` (2, T) for cumulative lengths (S + 1,): 0, the end of the first sequence,
    and so on. Tokens after the last end form one more sequence.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    ends = torch.cat((cu_seqlens[1:], cu_seqlens.new_full((1,), num_tokens)))
    return torch.stack((cu_seqlens[sequence], ends[sequence])).int()
