"""A run's store as every rank of torchrun has it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stepgauge.runtime.world import KEPT_GROUP, World, joined_world
from stepgauge.spec.record import Record
from stepgauge.spec.store import Contents, RunStore, StoreError


class SharedStore(RunStore):
    """The store as every rank of torchrun sees it: rank 0 reads and writes, and tells the others
    what there is.
    """

    def __init__(self, folder: str | Path, world: World):
        super().__init__(folder)
        self._world = world

    def prepare(self) -> None:
        self._on_first(super().prepare)

    def append(self, record: Record) -> None:
        self._on_first(lambda: super(SharedStore, self).append(record))

    def read(self) -> Contents:
        return self._on_first(super().read)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._on_first(lambda: stack.enter_context(RunStore(self.folder).held()) and None)
            yield

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """The action's value on rank 0, given to all ranks; its StoreError too."""
        KEPT_GROUP.use_any(self._world)
        told: list[Any] = [None]
        if self._world.rank == 0:
            try:
                told = [(action(), None)]
            except StoreError as error:
                told = [(None, error)]
        dist.broadcast_object_list(told)
        value, failure = told[0]
        if failure is not None:
            raise failure
        return value


def store_for(folder: str | Path) -> RunStore:
    """The run at the folder, shared between the ranks where torchrun has started this process."""
    world = joined_world()
    return SharedStore(folder, world) if world is not None else RunStore(folder)
