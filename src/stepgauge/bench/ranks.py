"""Rows that many ranks measure together.

A Job whose `run` is an OnRanks has a spec with `ranks` (and `device`). Its function `measure` runs
on every rank, in a process group; `record` makes one record of what they gave. On one machine the
ranks are started here; in a process of torchrun they are there already, every rank walks the same
list of jobs, and rank 0 alone has the store.
"""

import contextlib
import dataclasses
import multiprocessing
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.measure.devices import limit_host_memory, out_of_memory_reason
from stepgauge.measure.environment import device_name
from stepgauge.runtime import extension as native
from stepgauge.runtime.launch import RankError, Ranks
from stepgauge.runtime.propagate_errors import together
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.runtime.world import KEPT_GROUP, TIMEOUT_S, World, default_backend, joined_world
from stepgauge.spec.record import Record
from stepgauge.spec.store import Contents, RunStore, StoreError


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """What a Job runs for a spec with `ranks`.

    measure    called with the spec on every rank; its value must be picklable
    record     makes the record from the spec and the values in the order of ranks; runs on rank 0
    shared     rows one after another may be measured by the same processes, which spares starting
               them
    timeout_s  of a collective: a rank that hangs longer ends the row
    """

    measure: Callable[[Any], Any]
    record: Callable[[Any, list[Any]], Record]
    shared: bool = False
    timeout_s: float = TIMEOUT_S

    def __call__(self, spec: Any) -> Record:
        """The row, in a rank, between its peers; the record is rank 0's, and the same on all."""
        return _measure_on_this_rank(self, spec)


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition, the rank that took longest: the job goes on when the last has finished.

    times  one list a rank, of equal length
    """
    return [max(step) for step in zip(*times, strict=True)]


class RankProcesses:
    """Measures jobs on ranks, and keeps the ranks for the next job where that may share them."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], _Session] | None = None

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, type: object, *_: object) -> None:
        self._close(kill=type is not None)

    def measure(self, run: OnRanks, spec: Any) -> Record:
        """The row's record. Raises RankError, MemoryError where memory ran out on some rank,
        ValueError.
        """
        world = joined_world()
        try:
            return (
                self._measure_started(run, spec)
                if world is None
                else _measure_joined(world, run, spec)
            )
        except RankError as error:
            if error.type == MemoryError.__name__:
                raise MemoryError(error.reason) from error
            raise

    def _measure_started(self, run: OnRanks, spec: Any) -> Record:
        settings = {"device": spec.device, "backend": _backend(spec), "timeout_s": run.timeout_s}
        key = (spec.ranks, *settings.values())
        if self._kept is None or not run.shared or self._kept[0] != key:
            self._close()
            self._kept = key, _Session(spec.ranks, settings)
        try:
            return self._kept[1].measure(run, spec)
        except BaseException:
            self._close(kill=True)
            raise
        finally:
            if not run.shared:
                self._close()

    def _close(self, *, kill: bool = False) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close(kill=kill)


def _measure_joined(world: World, run: OnRanks, spec: Any) -> Record:
    """In a process of torchrun. One rank's failure is the row's on all, which go on in a new
    process group.
    """
    if world.size != spec.ranks:
        raise ValueError(f"ranks is {spec.ranks}; torchrun has started {world.size}")
    device = world.device(spec.device)
    KEPT_GROUP.use(world, backend=_backend(spec), device=device, timeout_s=run.timeout_s)
    try:
        return together(world, lambda: run(spec), timeout_s=run.timeout_s)
    except RankError:
        KEPT_GROUP.close()
        raise


def _backend(spec: Any) -> str:
    """The process group's. A spec whose rows choose among several names none."""
    named = getattr(spec, "group_backend", None)
    return named or default_backend(spec.device)


class _Session:
    """Ranks that wait for jobs: rank 0 holds the other end of a pipe and hands each job to its
    peers.
    """

    def __init__(self, ranks: int, settings: Mapping[str, Any]):
        self._pipe, other = multiprocessing.get_context("forkserver").Pipe()
        self._ranks = Ranks(_serve, other, ranks=ranks, **settings)
        self._ranks.__enter__()

    def measure(self, run: OnRanks, spec: Any) -> Record:
        with contextlib.suppress(BrokenPipeError):  # who broke it is told below
            self._pipe.send((run, spec))
        while not self._pipe.poll(0.1):
            if not self._ranks.running:
                self._ranks.wait()
        return self._pipe.recv()

    def close(self, *, kill: bool) -> None:
        """Lets the ranks end by themselves, or ends them."""
        if not kill:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
        self._ranks.__exit__(KeyboardInterrupt if kill else None)
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """A rank's loop: the next job from rank 0, until there is none."""
    is_first = dist.get_rank() == 0
    while True:
        job = [pipe.recv() if is_first else None]
        dist.broadcast_object_list(job)
        if job[0] is None:
            return
        run, spec = job[0]
        record = run(spec)
        if is_first:
            pipe.send(record)


def _measure_on_this_rank(run: OnRanks, spec: Any) -> Record:
    native.forget()
    if spec.device == "cpu":
        limit_host_memory()
    try:
        value = run.measure(spec)
    except Exception as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        raise MemoryError(reason) from error
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (value, platform.node(), _device_name(spec.device)))
    values, hosts, devices = (list(part) for part in zip(*given, strict=True))
    found = [run.record(spec, values) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    record = found[0]
    assert record is not None
    where = {"hosts": hosts, "devices": devices, "threads_per_rank": torch.get_num_threads()}
    return dataclasses.replace(record, environment={**record.environment, **where})


def _device_name(device: str) -> str:
    return device_name(torch.device("cuda") if device.startswith("cuda") else torch.device(device))


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


def is_first_process() -> bool:
    """Whether this process speaks for all: it does unless torchrun has made it another rank than 0."""
    numbers = torchrun_numbers()
    return numbers is None or numbers[0] == 0
