"""Tracks every storage: when it is born and dies, who made it and what for.

Below autograd, as a dispatch mode, each operator's outputs are seen; weak references tell of their
end. The category is known later than the birth: a storage is a gradient when a parameter's .grad
holds it, optimizer state when the optimizer's state does, an activation when it outlives the
forward pass that made it.
"""

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from stepgauge.measure.memory.autograd_engine import (
    adds_in_place,
    forward_number,
    held_by_buffer,
    last_number,
    storage_number,
    takes_sparse,
)
from stepgauge.measure.memory.autograd_engine import node as autograd_node
from stepgauge.spec.memory import ACTIVATIONS, GRADIENTS, OTHER, TEMPORARIES

SKIPPED_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


@dataclasses.dataclass(eq=False)
class Allocation:
    """A storage's life. `born` and `died` count the allocator's events; None where it still lives.

    module    path of the module that ran when it was made
    line      file and line of the program that made it
    operator  what made it
    saver     path of the module whose autograd node keeps it for backward
    """

    bytes: int
    born: int
    phase: str
    operator: str
    module: str = ""
    line: str = ""
    category: str = TEMPORARIES
    saver: str | None = None
    died: int | None = None
    address: int = 0


@dataclasses.dataclass(frozen=True)
class Phase:
    """A named stretch of the run, in events of the allocator: from `start` to before `end`."""

    name: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class StorageMark:
    """What is told of a storage whose birth was not seen: compiled code made it."""

    event: int
    address: int
    category: str
    module: str = ""
    operator: str = ""
    line: str = ""


@dataclasses.dataclass(frozen=True)
class Window:
    """The events in which one operator ran."""

    start: int
    end: int
    operator: str
    module: str
    line: str


@dataclasses.dataclass(frozen=True)
class Workspace:
    """What an operator takes beside its outputs; what `stays` is never given back."""

    bytes: int
    name: str
    stays: bool = False


class StorageTracker(TorchDispatchMode):
    """Tracks storages on one kind of device. `events` reads the allocator's own count of events,
    where it has one.

    workspaces  what an operator takes beside its outputs, by (operator, arguments, in backward); none
            on real tensors, where the allocator's history has them
    """

    def __init__(
        self,
        device: torch.device,
        *,
        events: Callable[[], int] | None = None,
        workspaces: Callable[[Any, Any, bool], Iterable[Workspace]] | None = None,
    ):
        super().__init__()
        held_by_buffer()  # found now: later is within backward
        self.device_type = device.type
        self.allocations: list[Allocation] = []
        self.phases: list[Phase] = []
        self.windows: list[Window] = []
        self.marks: list[StorageMark] = []
        self._events = events
        self._workspaces = workspaces
        self._count = 0
        self._phase = ""
        self._live: dict[int, tuple[Allocation, Any]] = {}
        self._paths: dict[int, str] = {}
        self._running: list[str] = []
        # autograd sequence number -> module and line of the forward
        self._made: dict[int, tuple[str, str]] = {}
        self._within: list[Allocation] = []  # born since the outermost module began

    # ---- what is told from outside -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, self._phase = self.now(), name
        self._within.clear()
        try:
            yield
        finally:
            if torch.is_grad_enabled() and name == "forward":
                self.keep_for_backward()
            self.phases.append(Phase(name, start, self.now()))
            self._phase = ""

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Names of the module's parts, gradients as they are made, and what autograd saves."""
        self._paths = {id(part): path for path, part in module.named_modules()}
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
            *(
                parameter.register_post_accumulate_grad_hook(
                    lambda p: self.label([p.grad], GRADIENTS)
                )
                for parameter in module.parameters()
                if parameter.requires_grad
            ),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def label(self, tensors: Iterable[Any], category: str, *, name: str = "") -> None:
        """The storages of these tensors are of that category for good; `name` says whose."""
        for part in self._parts(tensors):
            found = self._live.get(storage_number(part))
            if found is not None:
                found[0].category = category
                found[0].module = name or found[0].module
            elif self._events:
                self.marks.append(StorageMark(self.now(), _address(part), category, name))
            else:
                self._see(part, "", name, "", category)

    def held_for_backward(self, tensor: Tensor, operator: str, module: str, line: str) -> None:
        """Autograd holds the tensor: an activation, unless it is known as something else."""
        for part in self._parts([tensor]):
            if storage_number(part) in self._live:
                continue
            if self._events:
                self.marks.append(
                    StorageMark(self.now(), _address(part), ACTIVATIONS, module, operator, line)
                )
            else:
                self._see(part, operator, module, line, ACTIVATIONS)

    def keep_for_backward(self) -> None:
        """What the forward pass made and still lives is held for backward."""
        for allocation in self._within:
            if allocation.died is None and allocation.category == TEMPORARIES:
                allocation.category = ACTIVATIONS
        self._within.clear()

    def now(self) -> int:
        return self._events() if self._events else self._count

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and adds_in_place(func, args):  # the engine's own addition has no alpha
            return args[0].add_(args[1])
        if takes_sparse(func, args):
            return args[0]
        in_backward = autograd_node() is not None
        module, line = self._origin(in_backward)
        start = self.now()
        passing = (
            [
                self._begin_workspace(e, module, line)
                for e in self._workspaces(func, args, in_backward)
            ]
            if self._workspaces
            else []
        )
        there = self._storages_before(func, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        # set_ takes storage that was there: deepcopy reads buffers of a module at hand so
        made = [] if func.overloadpacket is torch.ops.aten.set_ else tree_leaves(result)
        for part in self._parts(made):
            if storage_number(part) not in there:
                self._see(part, name, module, line)
        for allocation in passing:
            if allocation is not None:
                self._end(allocation)
        if self._events and (end := self.now()) > start:
            self.windows.append(Window(start, end, name, module, line))
        return result

    def _storages_before(self, func: Any, arguments: Any) -> set[int]:
        """Of the operator's inputs, those that have memory: an output on one of them is no birth.

        Empty where the allocator tells of births, and of lift_fresh, which is how a tensor of Python
        values is first seen.
        """
        if self._events or func is torch.ops.aten.lift_fresh.default:
            return set()
        return {
            storage_number(part)
            for part in self._parts(tree_leaves(arguments))
            if part.untyped_storage().nbytes()
        }

    def _see(
        self, tensor: Tensor, operator: str, module: str, line: str, category: str = TEMPORARIES
    ) -> None:
        storage, key = tensor.untyped_storage(), storage_number(tensor)
        if key in self._live or not storage.nbytes():
            return
        address = _address(tensor) if self._events else 0
        allocation = self._begin(
            Allocation(
                storage.nbytes(), 0, self._phase, operator, module, line, category, address=address
            )
        )
        self._within.append(allocation)
        self._live[key] = allocation, weakref.ref(storage, lambda _: self._died(key))

    def _parts(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Those of the values that are tensors on the device, each as what holds its memory."""
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self.device_type:
                yield from dense_parts(value)

    def _died(self, key: int) -> None:
        self._end(self._live.pop(key)[0])

    def _begin(self, allocation: Allocation) -> Allocation:
        allocation.born = self.now()
        self._count += 1
        self.allocations.append(allocation)
        return allocation

    def _end(self, allocation: Allocation) -> None:
        allocation.died = self.now()
        self._count += 1

    def _begin_workspace(self, extra: Workspace, module: str, line: str) -> Allocation | None:
        """The allocation, to be ended after the operator, or None if it stays."""
        category = OTHER if extra.stays else TEMPORARIES
        made = self._begin(
            Allocation(extra.bytes, 0, self._phase, extra.name, module, line, category)
        )
        return None if extra.stays else made

    def _saved(self, tensor: Tensor) -> Tensor:
        for part in self._parts([tensor]):
            found = self._live.get(storage_number(part))
            if found is not None and found[0].saver is None:
                found[0].saver = self._running[-1] if self._running else ""
        return tensor

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if not self._running and self._phase != "forward":
            self._within.clear()
        self._running.append(self._paths.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._running:
            self._running.pop()
        # a part was computed again for its gradient
        if not self._running and self._phase == "backward":
            self.keep_for_backward()

    def _origin(self, in_backward: bool) -> tuple[str, str]:
        """Module and line that run; in backward those of the forward operation."""
        if in_backward and not self._running:
            return self._made.get(forward_number(autograd_node()), ("", ""))
        found = (self._running[-1] if self._running else "", program_line())
        self._made[last_number()] = found
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold its memory: itself, indices and values of a sparse one, what a wrapper
    such as a nested tensor wraps.
    """
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for each in inner for part in dense_parts(each)]
    if tensor.layout in (torch.strided, torch.jagged):
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # of another library, such as oneDNN, which tells no size


def program_line() -> str:
    """The innermost line of the program that is neither torch's nor of this folder."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own(file):
            return f"{short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_own(file: str) -> bool:
    """Whether the file is the program's: neither torch's nor of this folder."""
    return not file.startswith(SKIPPED_FOLDERS)


@functools.cache
def short_path(file: str) -> str:
    """The file and its folder."""
    return "/".join(Path(file).parts[-2:])
