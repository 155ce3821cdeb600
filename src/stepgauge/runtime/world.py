"""Which rank this process is, and the process group that it joins."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stepgauge.runtime.imagined_world import IMAGINED
from stepgauge.runtime.torchrun import torchrun_numbers

# of a collective: longer than any that is measured, short enough to notice a rank that hangs
TIMEOUT_S = 120.0
Object = TypeVar("Object")
_generations = itertools.count()
_ABORTING = threading.Lock()


class GroupError(Exception):
    """The ranks could not be brought together, or lost each other; one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """This process's rank of `size`, and its local rank of `local_size` on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def device(self, name: str) -> torch.device:
        """The device of this rank where all have one of the kind: "cuda" is the GPU of the local
        rank.

        Raises ValueError if there are fewer GPUs than ranks here.
        """
        device = torch.device(name)
        if device.type != "cuda":
            return device
        if self.local_size > torch.cuda.device_count():
            raise ValueError(
                f"{self.local_size} ranks on a machine of {torch.cuda.device_count()} GPUs: one GPU a rank"
            )
        return torch.device("cuda", self.local_rank)


def joined_world() -> World | None:
    """Read from what torchrun sets in the environment; None in a process that it has not started."""
    numbers = torchrun_numbers()
    if numbers is None:
        return None
    rank, size, local_rank, local_size = numbers
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def this_world() -> World:
    """`joined_world`, of code that runs on ranks alone."""
    world = joined_world()
    assert world is not None, "the launcher sets the environment"
    return world


def gathered_objects(value: Object, group: dist.ProcessGroup | None = None) -> list[Object]:
    """What each rank of the group gives, by rank. All of them must call it. Ranks that are imagined
    give what this one does.
    """
    values = [value] * dist.get_world_size(group)
    if dist.get_backend(group) != IMAGINED:
        dist.all_gather_object(values, value, group=group)
    return values


def default_backend(device: str) -> str:
    """NCCL for GPU tensors with Gloo beside it for CPU tensors; Gloo where there are no GPUs."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


@contextlib.contextmanager
def process_group(
    world: World, *, backend: str, device: torch.device, timeout_s: float = TIMEOUT_S
) -> Iterator[None]:
    """The default process group while the block runs; groups may follow one another in a process.

    Raises ValueError for a network interface that is not there, GroupError if the ranks do not find
    each other.
    """
    check_interfaces()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if device.type == "cuda" and "nccl" in backend else None
    timeout = timedelta(seconds=timeout_s)
    try:
        store = shared_store(f"group{next(_generations)}")
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=bound,
        )
        _wait_until_all_joined(store, world)
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).partition("\n")[0]
        raise GroupError(
            f"rank {world.rank} of {world.size} cannot join the others at {where}: {reason}"
        ) from error
    try:
        yield
    finally:
        if dist.is_initialized():  # not when it was aborted
            dist.destroy_process_group()
        _free_groups()


def _free_groups() -> None:
    """Gloo closes the connections of a group when nobody has it any more; ranks that wait for this
    one learn so that it has gone. DTensor's caches keep meshes, and torch 2.13's meshes their groups.
    """
    for mesh in (each for each in gc.get_objects() if type(each) is DeviceMesh):
        getattr(mesh, "_pg_registry", {}).clear()  # the way out: a public end of a mesh
    gc.collect()


def _wait_until_all_joined(store: dist.Store, world: World) -> None:
    """Gloo connects pair by pair: a rank that ends at once would leave others still connecting."""
    store.set(f"joined {world.rank}", "")
    store.wait([f"joined {rank}" for rank in range(world.size)])


class KeptGroup:
    """The group of a process that torchrun started; it stays until another is asked for."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._stack = contextlib.ExitStack()

    def use(
        self, world: World, *, backend: str, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Makes it the default group. All ranks must ask for the same."""
        key = (backend, device, timeout_s)
        if key != self._key:
            self.close()
            _import_what_keeps_a_group()
            self._stack.enter_context(
                process_group(world, backend=backend, device=device, timeout_s=timeout_s)
            )
            self._key = key

    def use_any(self, world: World) -> None:
        """Makes sure that there is one, for objects that the ranks tell each other."""
        if not self._key:
            self.use(world, backend="gloo", device=torch.device("cpu"))

    def close(self) -> None:
        self._key = ()
        self._stack.close()


def _import_what_keeps_a_group() -> None:
    """Modules with functions whose default argument is the group that stands when they are
    imported. It would outlive its end, and its threads abort the interpreter at its own.
    """
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.distributed.optim  # noqa: F401


KEPT_GROUP = KeptGroup()
atexit.register(KEPT_GROUP.close)


def abort_groups() -> None:
    """Ends all groups of this rank: who waits in a collective, here or on a peer, gets an error."""
    with _ABORTING:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def shared_store(name: str) -> dist.Store:
    """Keys that the ranks share, beside their collectives and over a connection of its own."""
    return dist.PrefixStore(name, _rendezvous().clone())  # type: ignore[attr-defined]


@functools.cache
def _rendezvous() -> dist.Store:
    """One for the life of the process: a second would ask for the same port."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
    return store


def check_interfaces() -> None:
    """Raises ValueError if an environment variable names an interface that is not there."""
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = os.environ.get(variable, "")
        if asked.startswith("^"):  # NCCL: all but these
            continue
        exact = variable.startswith("GLOO") or asked.startswith("=")
        for name in filter(None, asked.removeprefix("=").split(",")):
            found = name in known if exact else any(there.startswith(name) for there in known)
            if not found:
                raise ValueError(f"{variable} is {asked!r}; this machine has {', '.join(known)}")
