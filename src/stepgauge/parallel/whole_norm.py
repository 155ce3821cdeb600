"""Clips gradients that are spread over the ranks by their total norm."""

import collections
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.sharding import local_part
from stepgauge.parallel.shares import as_plain


@torch.no_grad()
def clip_whole_norm(
    gradients: Iterable[Tensor],
    counted: Iterable[tuple[int, Tensor]],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scales this rank's gradients so that the norm of the gradients of all ranks of the group is at
    most `max_norm`; returns the norm before, in float64. All ranks must call it.

    counted  the pieces of gradients that the norm is computed from, each with the number of ranks
             that have this piece: every value then counts once
    """
    alike = collections.defaultdict(list)
    for ranks, piece in counted:
        plain = as_plain(local_part(piece))
        if plain.numel():
            alike[ranks, plain.dtype].append(plain)
    # float64, because squares of all ranks are summed
    square = torch.zeros((), dtype=torch.float64, device=device)
    for (ranks, _), pieces in alike.items():
        norms = torch.stack(torch._foreach_norm(pieces)).double()
        square += norms.square().sum() / ranks
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scaled = collections.defaultdict(list)
    for gradient in gradients:
        scaled[gradient.dtype].append(as_plain(local_part(gradient)))
    for dtype, same_dtype in scaled.items():
        torch._foreach_mul_(same_dtype, factor.to(dtype))
    return norm
