"""Tracks every storage from its allocation to its release, with the operator that made it and its use.

A dispatch mode below autograd sees each operator's outputs, and weak references report their release.
The category is set later: a storage is a gradient if a parameter's .grad holds it, optimizer state if
the optimizer's state holds it, and an activation if it outlives the forward that made it.
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
    is_avoidable_sparse_copy,
    last_number,
    references_of_buffer,
    storage_number,
)
from stepgauge.measure.memory.autograd_engine import node as autograd_node
from stepgauge.spec.memory import ACTIVATIONS, GRADIENTS, OTHER, TEMPORARIES

SKIPPED_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
CALLERS = tuple(str(Path(__file__).parents[2] / room) for room in ("train", "bench", "api"))


@dataclasses.dataclass(eq=False)
class Allocation:
    """The lifetime of a storage.

    born, died  events of the allocator; died is None while it is held
    module      path of the module that made it
    line        file and line of the program that made it
    operator    name of the operator that made it
    saver       path of the module whose autograd node keeps it for backward
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
    """A named part of the run: the allocator's events from `start` to before `end`."""

    name: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class StorageMark:
    """A label for a storage whose allocation was not seen, because compiled code made it."""

    event: int
    address: int
    category: str
    module: str = ""
    operator: str = ""
    line: str = ""


@dataclasses.dataclass(frozen=True)
class Window:
    """The allocator's events while one operator ran."""

    start: int
    end: int
    operator: str
    module: str
    line: str


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Memory that an operator allocates in addition to its outputs.

    stays  True if it is never freed
    """

    bytes: int
    name: str
    stays: bool = False


class StorageTracker(TorchDispatchMode):
    """Tracks storages on one kind of device.

    events      returns the allocator's count of events, if it has one
    workspaces  returns an operator's workspaces, for (operator, arguments, in backward). Not needed
                on real tensors, where the allocator's history contains them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        events: Callable[[], int] | None = None,
        workspaces: Callable[[Any, Any, bool], Iterable[Workspace]] | None = None,
    ):
        super().__init__()
        references_of_buffer()  # measured now, because later calls are inside of backward
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
        self._running: list[str] = []  # paths of the modules that run, innermost last
        self._origins: dict[int, tuple[str, str]] = {}  # module and line, by forward number
        self._recent: list[Allocation] = []  # born since the outermost module was called

    # ---- labels from the caller --------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, self._phase = self.now(), name
        self._recent.clear()
        try:
            yield
        finally:
            if torch.is_grad_enabled() and name == "forward":
                self.keep_for_backward()
            self.phases.append(Phase(name, start, self.now()))
            self._phase = ""

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Tracks which module runs, labels gradients, and notes the modules that save tensors."""
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
        """Sets the category of the tensors' storages, and their module to `name` if there is one."""
        for part in self._parts(tensors):
            tracked = self._live.get(storage_number(part))
            if tracked is not None:
                allocation, _ = tracked
                allocation.category = category
                allocation.module = name or allocation.module
            elif self._events:
                self.marks.append(StorageMark(self.now(), _address(part), category, name))
            else:
                self._see(part, "", name, "", category)

    def held_for_backward(self, tensor: Tensor, operator: str, module: str, line: str) -> None:
        """Reports a tensor that autograd holds: an activation, unless it has another label."""
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
        """Labels what the forward made and still holds as activations."""
        for allocation in self._recent:
            if allocation.died is None and allocation.category == TEMPORARIES:
                allocation.category = ACTIVATIONS
        self._recent.clear()

    def now(self) -> int:
        return self._events() if self._events else self._count

    # ---- observations ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and adds_in_place(func, args):  # the engine's addition has no alpha
            return args[0].add_(args[1])
        if is_avoidable_sparse_copy(func, args):
            return args[0]
        in_backward = autograd_node() is not None
        module, line = self._origin(in_backward)
        start = self.now()
        workspaces = self._workspaces(func, args, in_backward) if self._workspaces else ()
        temporary = [self._begin_workspace(each, module, line) for each in workspaces]
        existing = self._storages_before(func, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        # set_ uses an existing storage, as when deepcopy copies a module's buffers.
        outputs = [] if func.overloadpacket is torch.ops.aten.set_ else tree_leaves(result)
        for part in self._parts(outputs):
            if storage_number(part) not in existing:
                self._see(part, name, module, line)
        for allocation in temporary:
            if allocation is not None:
                self._end(allocation)
        if self._events and (end := self.now()) > start:
            self.windows.append(Window(start, end, name, module, line))
        return result

    def _storages_before(self, func: Any, arguments: Any) -> set[int]:
        """Returns the storages of the operator's inputs. An output with one of them is not new.

        It is empty if the allocator counts events itself, and for lift_fresh, whose input is a new
        tensor of Python values.
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
        self._recent.append(allocation)
        self._live[key] = allocation, weakref.ref(storage, lambda _: self._end_storage(key))

    def _parts(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Yields the dense parts of the values that are tensors on the device."""
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self.device_type:
                yield from dense_parts(value)

    def _end_storage(self, key: int) -> None:
        self._end(self._live.pop(key)[0])

    def _begin(self, allocation: Allocation) -> Allocation:
        allocation.born = self.now()
        self._count += 1
        self.allocations.append(allocation)
        return allocation

    def _end(self, allocation: Allocation) -> None:
        allocation.died = self.now()
        self._count += 1

    def _begin_workspace(self, workspace: Workspace, module: str, line: str) -> Allocation | None:
        """Returns the allocation, which must end after the operator, or None if it stays."""
        category = OTHER if workspace.stays else TEMPORARIES
        allocation = self._begin(
            Allocation(workspace.bytes, 0, self._phase, workspace.name, module, line, category)
        )
        return None if workspace.stays else allocation

    def _saved(self, tensor: Tensor) -> Tensor:
        for part in self._parts([tensor]):
            tracked = self._live.get(storage_number(part))
            if tracked is not None and tracked[0].saver is None:
                tracked[0].saver = self._running[-1] if self._running else ""
        return tensor

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if not self._running and self._phase != "forward":
            self._recent.clear()
        self._running.append(self._paths.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._running:
            self._running.pop()
        if not self._running and self._phase == "backward":  # checkpointing recomputed a module
            self.keep_for_backward()

    def _origin(self, in_backward: bool) -> tuple[str, str]:
        """Returns the module and line that run now; in backward, those of the forward operation."""
        if in_backward and not self._running:
            return self._origins.get(forward_number(autograd_node()), ("", ""))
        origin = (self._running[-1] if self._running else "", program_line())
        self._origins[last_number()] = origin
        return origin


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold its memory: itself, the indices and values of a sparse tensor, or
    the inner tensors of a wrapper such as a nested tensor.
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
    return []  # tensors of other libraries, such as oneDNN, have no known size


def program_line() -> str:
    """Returns the innermost line on the stack that is outside of torch and this folder; "" if it only
    calls the network or the optimizer, as the training step does.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_program_file(file):
            return "" if file.startswith(CALLERS) else f"{short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_program_file(file: str) -> bool:
    """True if the file belongs to the program: neither to torch nor to this folder."""
    return not file.startswith(SKIPPED_FOLDERS)


@functools.cache
def short_path(file: str) -> str:
    """Returns the file with its folder."""
    return "/".join(Path(file).parts[-2:])
