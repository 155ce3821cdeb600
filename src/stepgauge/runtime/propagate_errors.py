"""Ranks that go on together: what one of them suffers alone, all of them learn.

A rank that fails leaves its peers in a collective that it will never join. They are told over the
rendezvous store, which no collective blocks: a thread of each rank looks there, and aborts the
process group.
"""

import itertools
import json
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from stepgauge.runtime.launch import RankError
from stepgauge.runtime.world import TIMEOUT_S, GroupError, World, abort_groups, shared_store

LOOK_EVERY_S = 0.25
_FAILURE = "failure"
_blocks = itertools.count()
Value = TypeVar("Value")


def propagate_errors(
    world: World, action: Callable[[], Value], *, timeout_s: float = TIMEOUT_S
) -> Value:
    """The action's value, on ranks that are all in here, if no rank's action failed.

    Otherwise raises the RankError of the first that failed, on every rank, and the process group is
    gone. Raises GroupError if a rank does not end; a collective of the action takes `timeout_s` at
    most.
    """
    name = f"propagate{next(_blocks)}"
    store = shared_store(name)
    with _Watch(shared_store(name)):
        try:
            value = action()
        except Exception as error:
            store.compare_set(_FAILURE, "", _encoded(error, world))  # the first one's stays
            abort_groups()
        store.set(f"ended{world.rank}", "")
        _wait_for_all(store, world, timedelta(seconds=2 * timeout_s))
    if store.check([_FAILURE]):
        abort_groups()
        raise _decoded(store.get(_FAILURE))
    return value


class _Watch:
    """Aborts this rank's groups when a peer has failed, while the block runs."""

    def __init__(self, store: dist.Store):
        self._store, self._over = store, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            if self._store.check([_FAILURE]):
                abort_groups()
                return


def _wait_for_all(store: dist.Store, world: World, limit: timedelta) -> None:
    try:
        store.wait([f"ended{rank}" for rank in range(world.size)], limit)
    except dist.DistError as error:
        raise GroupError(
            f"rank {world.rank} of {world.size} has lost the others: {_first_line(error)}"
        ) from error


def _encoded(error: Exception, world: World) -> str:
    reason = _first_line(error) or "no message"
    type_ = type(error).__name__
    return json.dumps({
        "message": f"rank {world.rank} of {world.size}: {type_}: {reason}", "rank": world.rank, "type": type_,
        "reason": reason, "trace": "".join(traceback.format_exception(error)),
    })  # fmt: skip


def _decoded(text: bytes) -> RankError:
    return RankError(**json.loads(text))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
