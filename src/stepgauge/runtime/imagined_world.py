"""A process group of imaginary ranks, to see in one process what one of many ranks would run."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

IMAGINED = "fake"  # torch's name of the backend, which it uses in its own tests


@contextlib.contextmanager
def imagined_world(ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of so many while the block runs; its messages go nowhere.

    torch has no public backend of this kind; the way out: one that torch.distributed documents.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(IMAGINED, store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
