"""The rank of this process, and its process groups."""

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

# Timeout of collectives: longer than any that is measured, short enough to notice a hanging rank.
TIMEOUT_S = 120.0
Object = TypeVar("Object")
_generations = itertools.count()
_ABORTING = threading.Lock()


class GroupError(Exception):
    """The ranks could not connect, or lost each other; the message is one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The rank of this process among `size`, and its local rank among `local_size` on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def device(self, name: str) -> torch.device:
        """Returns this rank's device: with "cuda", the GPU of its local rank.

        Raises ValueError if this machine has fewer GPUs than ranks.
        """
        device = torch.device(name)
        if device.type != "cuda":
            return device
        if self.local_size > torch.cuda.device_count():
            raise ValueError(
                f"there are {self.local_size} ranks on a machine with {torch.cuda.device_count()} "
                "GPUs; each rank needs its own"
            )
        return torch.device("cuda", self.local_rank)


def joined_world() -> World | None:
    """Returns the world that torchrun set in the environment; None if it did not start this process."""
    numbers = torchrun_numbers()
    if numbers is None:
        return None
    rank, size, local_rank, local_size = numbers
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def this_world() -> World:
    """Returns the world, in code that runs only on ranks."""
    world = joined_world()
    assert world is not None, "the launcher sets the environment"
    return world


def gathered_objects(value: Object, group: dist.ProcessGroup | None = None) -> list[Object]:
    """Returns the values of all ranks of the group, by rank. All of them must call this.

    Imaginary ranks (imagined_world) give the same value as this one.
    """
    values = [value] * dist.get_world_size(group)
    if dist.get_backend(group) != IMAGINED:
        dist.all_gather_object(values, value, group=group)
    return values


def default_backend(device: str) -> str:
    """Returns NCCL for GPU tensors and Gloo for CPU tensors, or Gloo alone without GPUs."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


@contextlib.contextmanager
def process_group(
    world: World, *, backend: str, device: torch.device, timeout_s: float = TIMEOUT_S
) -> Iterator[None]:
    """Creates the default process group for the block; a process may do so several times.

    Raises ValueError for an unknown network interface, GroupError if the ranks do not find each
    other.
    """
    check_interfaces()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    device_id = device if device.type == "cuda" and "nccl" in backend else None
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
            device_id=device_id,
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
        if dist.is_initialized():  # unless it was aborted
            dist.destroy_process_group()
        _free_groups()


def _free_groups() -> None:
    """Drops the last references to destroyed groups, so that Gloo closes their connections.

    Only then do ranks that wait for this one notice that it is gone. DTensor's caches keep meshes,
    and the meshes of torch 2.13 keep their groups.
    """
    for mesh in (each for each in gc.get_objects() if type(each) is DeviceMesh):
        getattr(mesh, "_pg_registry", {}).clear()  # the way out: a public end of a mesh
    gc.collect()


def _wait_until_all_joined(store: dist.Store, world: World) -> None:
    """Waits for all ranks. Gloo connects in pairs, so a rank that ends early would break the others."""
    store.set(f"joined {world.rank}", "")
    store.wait([f"joined {rank}" for rank in range(world.size)])


class KeptGroup:
    """The default group under torchrun, kept until one with other settings is needed."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._stack = contextlib.ExitStack()

    def use(
        self, world: World, *, backend: str, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Makes a group with these settings the default. All ranks must call it with the same ones."""
        key = (backend, device, timeout_s)
        if key != self._key:
            self.close()
            _import_modules_that_keep_the_group()
            self._stack.enter_context(
                process_group(world, backend=backend, device=device, timeout_s=timeout_s)
            )
            self._key = key

    def use_any(self, world: World) -> None:
        """Ensures that there is a group, for exchanging objects between ranks."""
        if not self._key:
            self.use(world, backend="gloo", device=torch.device("cpu"))

    def close(self) -> None:
        self._key = ()
        self._stack.close()


def _import_modules_that_keep_the_group() -> None:
    """Imports modules whose functions have the current default group as a default argument.

    If they were imported later, they would keep a group alive beyond its end, and its threads would
    abort the interpreter at exit.
    """
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.distributed.optim  # noqa: F401


KEPT_GROUP = KeptGroup()
atexit.register(KEPT_GROUP.close)


def abort_groups() -> None:
    """Aborts all groups of this rank. Collectives that wait, here or on a peer, raise an error."""
    with _ABORTING:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def shared_store(name: str) -> dist.Store:
    """Returns a key-value store shared by the ranks, with its own connection."""
    return dist.PrefixStore(name, _rendezvous().clone())  # type: ignore[attr-defined]


@functools.cache
def _rendezvous() -> dist.Store:
    """Returns the one store of this process: a second one would need the same port."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
    return store


def check_interfaces() -> None:
    """Raises ValueError if an environment variable names an unknown network interface."""
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if value.startswith("^"):  # NCCL: all interfaces except these
            continue
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        for name in filter(None, value.removeprefix("=").split(",")):
            exists = name in known if is_exact else any(i.startswith(name) for i in known)
            if not exists:
                raise ValueError(f"{variable} is {value!r}; this machine has {', '.join(known)}")
