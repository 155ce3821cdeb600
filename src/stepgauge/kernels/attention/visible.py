"""Which keys a query sees: the causal mask, a sliding window, sequences packed one after another.

Legend: T tokens, T_q queries, T_k keys, S sequences. `spans` is (2, T) int32: of each token, where
its sequence begins and where it ends.
"""

import torch
from torch import Tensor


def visible(rows, cols, is_causal, window=0, spans=None) -> Tensor:
    """(queries, keys) true where the query of that number sees the key of that number."""
    distance = rows[:, None] - cols[None, :]
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        seen = seen & (distance.abs() < window)
    if spans is not None:
        begins = spans[0]
        seen = seen & (begins[rows][:, None] == begins[cols][None, :])
    return seen


def num_pairs(num_queries: int, num_keys: int, is_causal, window=0, cu_seqlens=None) -> int:
    """Pairs of a query and a key whose score is computed. As torch counts: all, also under a causal
    mask; of a window and of packed sequences those within. Of `cu_seqlens` without values, all.
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
    """Raises ValueError for a window that is none, or that leaves a query without a key."""
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window {window}: accepted are 0 (none) or a positive number of keys")
    if window and num_queries - num_keys >= window:
        raise ValueError(
            f"window {window} with {num_queries} queries and {num_keys} keys: the last query sees "
            f"none of them; accepted are windows over {num_queries - num_keys}"
        )


def spans_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """(2, T) of the cumulative lengths (S + 1,): 0, the end of the first sequence, and so on.
    Tokens after the last end are a sequence of their own.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    ends = torch.cat((cu_seqlens[1:], cu_seqlens.new_full((1,), num_tokens)))
    return torch.stack((cu_seqlens[sequence], ends[sequence])).int()
