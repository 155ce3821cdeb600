"""Delays interrupts where they would leave something half done."""

import contextlib
import importlib.abc
import importlib.machinery
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

DELAYED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delays Ctrl-C, and a SIGTERM that Python handles, until the block ends.

    Thread.start and Process.start must run in such a block. They are Python code that holds locks and
    sends messages in several parts: an exception in between can leave a lock held, so that the thread
    waits for it forever, or a process with half of its arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread only
        return
    handlers: dict[int, Any] = {
        number: handler for number in DELAYED if callable(handler := signal.getsignal(number))
    }
    delay = _Delay(handlers)
    try:
        for number in handlers:
            signal.signal(number, delay)
        yield
    finally:
        delay.is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in dict.fromkeys(delay.arrived):
            signal.raise_signal(sent)


class _Delay:
    """A handler that collects signals, and calls those that it replaces once the delay is over: one may
    raise before all others stand in their place again.
    """

    def __init__(self, handlers: Mapping[int, Any]):
        self.handlers, self.is_over = handlers, False
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            self.handlers[number](number, frame)
        else:
            self.arrived.append(number)


class UninterruptedImports(importlib.abc.MetaPathFinder):
    """Delays interrupts while one of these packages is imported. C code of torch and numpy drops an
    exception from what it imports, so that the interrupted program would go on; or a second import
    of the rest fails.
    """

    def __init__(self, *packages: str):
        self.packages = packages

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _UninterruptedLoader(spec.loader)
        return spec


class _UninterruptedLoader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self.loader = loader

    def __getattr__(self, name: str) -> Any:  # such as get_data, which importlib.resources calls
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with interrupts_delayed():
            self.loader.exec_module(module)
