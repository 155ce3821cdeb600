"""The norm of gradients of which each rank has some: every value counts once, wherever it is."""

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
    """Scales the gradients of this rank so that the norm of those of all ranks of the group is at
    most `max_norm`; the norm before, in float64. All ranks must call it.

    counted  of what the norm is made: pieces of the gradients, and how many ranks have each
    """
    alike = collections.defaultdict(list)
    for ranks, piece in counted:
        plain = as_plain(local_part(piece))
        if plain.numel():
            alike[ranks, plain.dtype].append(plain)
    # in float64: the squares of all ranks add up
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
    for dtype, same in scaled.items():
        torch._foreach_mul_(same, factor.to(dtype))
    return norm
