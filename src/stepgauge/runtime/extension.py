"""Eager paths in C++: built by `prepare` before anything is measured or trained, else done without.

An autograd function in Python with its launches costs 50 to 150 µs of host time a step, often more
than the GPU needs. An ``Extension`` holds one C++ file that does the same: ``call`` is its function
once it is loaded, None before; it returns None for whatever it leaves to Python. Nothing is built
unless `prepare` is called. Without a C++ compiler, or with ``STEPGAUGE_EXTENSION=0``, ``call``
stays None and ``problem`` says why.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stepgauge.runtime.build import shared_library

OPT_OUT = "STEPGAUGE_EXTENSION"
PREFIX = "stepgauge_"
MODULE_H = Path(__file__).with_name("module.h")
_extensions: dict[str, "Extension"] = {}


def prepare(device: torch.device | str = "cuda") -> bool:
    """Builds or loads the C++ of every operation that is imported, and counts its calls from here.

    For a CUDA device; elsewhere nothing is built. The first time on a machine this takes some 20 s
    an operation and says so on stderr; the libraries are kept in the user's cache. Returns whether
    all of them serve; `served` says why not.
    """
    wanted = torch.device(device).type == "cuda" and torch.cuda.is_available()
    loaded = [extension.load() for extension in _extensions.values()] if wanted else [False]
    for extension in _extensions.values():
        extension.start_counting()
    return all(loaded)


def served() -> dict[str, str]:
    """For each operation called since `prepare`: "C++", or "Python: " and the reason.

    Python serves the first call of each kind and tells C++ how: these calls are not held against
    it.
    """
    paths = {name: extension.served() for name, extension in _extensions.items()}
    return {name: path for name, path in paths.items() if path is not None}


class Extension:
    """The C++ file `source`: a module named stepgauge_`name`, whose function `name` is `call`.

    `configure(module)` gives it the driver's functions. module.h has what every such file shares.
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
        self.problem: str | None = "stepgauge.kernels.prepare() was not called"
        self.kinds = 0  # of calls that C++ was told how to launch
        self.without_module = 0  # calls that Python served since there is no library
        self._is_tried = False
        self._start: tuple[int, ...] = (0, 0, 0)
        _extensions[name] = self

    def load(self) -> bool:
        """Builds or loads it, once; whether it serves."""
        if not self._is_tried:
            self._is_tried = True
            try:
                self._load()
            except Exception as error:  # Whatever it is, Python does the same work.
                self.problem = f"{type(error).__name__}: {error}"
        return self.call is not None

    def _load(self) -> None:
        if os.environ.get(OPT_OUT) == "0":
            raise RuntimeError(f"{OPT_OUT}=0")
        module = self.imported(self.build())
        self.configure(module)
        self.module, self.call, self.problem = module, getattr(module, self.name), None

    def build(self) -> Path:
        return shared_library(self.source, name=PREFIX + self.name, headers=self.headers)

    def imported(self, path: Path) -> ModuleType:
        loader = ExtensionFileLoader(PREFIX + self.name, str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def start_counting(self) -> None:
        self._start, self.without_module = self._counts(), 0

    def _counts(self) -> tuple[int, ...]:
        """So far: calls, those that C++ took, kinds of call that it was told of."""
        return (0, 0, 0) if self.module is None else (*self.module.calls(), self.kinds)

    def served(self) -> str | None:
        """Which language served the calls since the start of counting; None if there were none."""
        if self.module is None:
            return f"Python: {self.problem}" if self.without_module else None
        asked, taken, kinds = (a - b for a, b in zip(self._counts(), self._start, strict=True))
        if not asked:
            return None
        if not taken:
            return f"Python: {self.problem or 'C++ does not take such calls'}"
        in_part = [f"{taken} of {asked} calls"] if taken + kinds < asked else []
        return ", ".join(["C++", *in_part, *([self.problem] if self.problem else [])])
