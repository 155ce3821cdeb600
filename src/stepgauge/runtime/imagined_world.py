"""Ranks that are not there: what one of many would run can be seen by it alone."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

IMAGINED = "fake"  # as torch names the backend of its own tests


@contextlib.contextmanager
def imagined_world(ranks: int) -> Iterator[None]:
    """The default group while the block runs: of so many ranks this process is the first, and what it
    sends goes nowhere.

    torch has no public backend of this kind; the way out: one that torch.distributed documents.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(IMAGINED, store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
