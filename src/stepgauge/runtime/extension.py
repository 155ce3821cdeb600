"""Eager paths in C++: built in the background on first use, else done without.

An autograd function in Python with its launches costs 50 to 150 µs of host time a step, often more
than the GPU needs. An ``Extension`` holds one C++ file that does the same: ``call`` is its function
once it is there, None before; it returns None for whatever it leaves to Python. The first call that
could go there asks for it, and a thread builds it or loads it from the cache: nothing waits for
that but what measures (``settle``). Without a C++ compiler, or with ``STEPGAUGE_EXTENSION=0``,
``call`` stays None and ``problem`` says why.

Beside it, launch.py and launch.h launch compiled Triton kernels by address, from Python and from
C++.
"""

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from stepgauge.runtime.build import shared_library

OPT_OUT = "STEPGAUGE_EXTENSION"
PREFIX = "stepgauge_"
MODULE_H = Path(__file__).with_name("module.h")


class Extension:
    """The C++ file `source`, a module named stepgauge_`name` whose function of that name is `call`
    (module.h).

    `configure(module)` gives it the driver.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        configure: Callable[[Any], object],
        *,
        headers: Sequence[Path] = (),
    ):
        self.name, self.source, self.configure = name, source, configure
        self.headers = (MODULE_H, *headers)
        self.call: Callable[..., Any] | None = None
        self.module: Any = None
        self.problem: str | None = "nothing has asked for it yet"
        self._loading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_asked = self._is_tried = self._is_done = False
        self._counted: tuple[int, int] | None = None
        self._before_it_was_there = 0

    def ask(self) -> None:
        """A call that Python serves: begins to build or load it, at the first, and does not wait."""
        self._before_it_was_there += 1
        if self._is_asked or self._is_tried:
            return
        self._is_asked, _asked[self.name] = True, self
        self.problem = "it is being built"
        # Made here and not before: a process that was forked in between takes a thread of before
        # for one that ended.
        self._thread = threading.Thread(target=self.load, daemon=True)
        self._thread.start()

    def load(self) -> bool:
        """Builds or loads it now, once, for the GPU; whether it serves."""
        with self._loading:
            if not self._is_tried:
                self._is_tried, _asked[self.name] = True, self
                try:
                    self._load()
                except Exception as error:  # Whatever it is, Python does the same work.
                    self.problem = f"{type(error).__name__}: {error}"
                self._is_done = True
        return self.call is not None

    def _load(self) -> None:
        if os.environ.get(OPT_OUT) == "0":
            raise RuntimeError(f"{OPT_OUT}=0")
        module = self.imported(self.build())
        self.configure(module)
        self.module, self.call, self.problem = module, getattr(module, self.name), None

    def begin_again(self) -> None:
        """In a process forked while this one was building: its thread is not there, and may have
        held the lock.
        """
        if not self._is_done:
            self._loading, self._thread = threading.Lock(), None
            self._is_asked = self._is_tried = False

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def build(self) -> Path:
        return shared_library(self.source, name=PREFIX + self.name, headers=self.headers)

    def imported(self, path: Path) -> ModuleType:
        loader = ExtensionFileLoader(PREFIX + self.name, str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def calls(self) -> tuple[int, int]:
        """How many there were, and how many of them C++ took."""
        asked, taken = (0, 0) if self.module is None else self.module.calls()
        return self._before_it_was_there + asked, taken

    def count_since(self, before: tuple[int, int]) -> None:
        asked, taken = (now - then for now, then in zip(self.calls(), before, strict=True))
        if asked:
            self._counted = asked, taken

    def forget(self) -> None:
        self._counted = None

    def served(self) -> str | None:
        """Who has served the calls that were counted last, or None without any."""
        if self.module is None:
            return f"Python: {self.problem}"
        if self._counted is None:
            return None
        asked, taken = self._counted
        if not taken:
            return f"Python: {self.problem or 'C++ does not take such calls'}"
        in_part = [f"{taken} of {asked} calls"] if taken < asked else []
        return ", ".join(["C++", *in_part, *([self.problem] if self.problem else [])])


_asked: dict[str, Extension] = {}


def _begin_again() -> None:
    for extension in list(_asked.values()):
        extension.begin_again()


os.register_at_fork(after_in_child=_begin_again)


def settle() -> bool:
    """Waits until every extension that was asked for is there, or has failed; whether any serves."""
    extensions = list(_asked.values())
    for extension in extensions:
        extension.settle()
    return any(extension.call is not None for extension in extensions)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Counts the calls within for `served`, unless there are none: a clock enters it around what it
    times.
    """
    before = {name: extension.calls() for name, extension in list(_asked.items())}
    yield
    for name, extension in list(_asked.items()):
        extension.count_since(before.get(name, (0, 0)))


def forget() -> None:
    """Counts nothing so far: at the beginning of a row in a process that has measured others."""
    for extension in list(_asked.values()):
        extension.forget()


def served() -> dict[str, str]:
    """For each extension that was asked for, who served what was counted: "C++", or "Python: " and
    the reason.
    """
    paths = {name: extension.served() for name, extension in list(_asked.items())}
    return {name: path for name, path in paths.items() if path is not None}
