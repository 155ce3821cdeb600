"""The store of a run whose ranks were started by torchrun."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stepgauge.runtime.world import KEPT_GROUP, World, joined_world
from stepgauge.spec.record import Record
from stepgauge.spec.store import Contents, RunStore, StoreError


class SharedStore(RunStore):
    """A store shared by torchrun's ranks: rank 0 reads and writes the files, and broadcasts the
    results to the others.
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
        """Runs the action on rank 0, and returns its value or raises its StoreError on all ranks."""
        KEPT_GROUP.use_any(self._world)
        outcome: list[Any] = [None]
        if self._world.rank == 0:
            try:
                outcome = [(action(), None)]
            except StoreError as error:
                outcome = [(None, error)]
        dist.broadcast_object_list(outcome)
        value, failure = outcome[0]
        if failure is not None:
            raise failure
        return value


def store_for(folder: str | Path) -> RunStore:
    """Returns the store of the folder, shared between ranks if torchrun started this process."""
    world = joined_world()
    return SharedStore(folder, world) if world is not None else RunStore(folder)
