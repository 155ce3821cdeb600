"""Eager paths in C++: built in the background on first use, else done without.

An autograd function in Python with its launches costs 50 to 150 µs of host time a step, often more than the GPU needs.
An ``Extension`` holds one C++ file that does the same: ``call`` is its function once it is there, None before; it
returns None for whatever it leaves to Python. The first CUDA call starts a thread that builds it, or loads it from the
cache: nothing waits for that. Without a C++ compiler, or with ``STEPGAUGE_EXTENSION=0``, ``call`` stays None and
``problem`` says why.

The compiler is called directly and its result moved into place in one step, where torch.utils.cpp_extension would leave
a lock behind if the process ended during the build.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch

OPT_OUT = "STEPGAUGE_EXTENSION"
HEADERS = Path(__file__).parent


class Extension:
    """The C++ file `source`, a module `name`; `configure(module)` gives it the driver, `function` names its `call`."""

    def __init__(self, name: str, source: Path, function: str, configure: Callable):
        self.name, self.source, self.function, self.configure = name, source, function, configure
        self.call = self.module = None
        self.problem: str | None = "nothing has asked for it yet"
        self._loading, self._thread = threading.Lock(), None

    def load(self) -> bool:
        """Build or load the extension now, for the GPU; return whether it serves."""
        with self._loading:
            try:
                if os.environ.get(OPT_OUT) == "0":
                    raise RuntimeError(f"{OPT_OUT}=0")
                if self.call is None:
                    module = self.imported(self.build())
                    self.configure(module)
                    self.module, self.call, self.problem = module, getattr(module, self.function), None
            except Exception as error:  # Whatever it is, Python does the same work.
                self.problem = f"{type(error).__name__}: {error}"
        return self.call is not None

    def load_in_background(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self.load, name=f"{self.name}-build", daemon=True)
            self._thread.start()

    def build(self) -> Path:
        """Return the shared library, compiled if the cache has none for this source and this torch."""
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("no C++ compiler")
        root = Path(torch.__file__).parent
        flags = ["-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        told = [*flags, torch.__version__, str(root), sys.version, compiler]
        sources = b"".join(path.read_bytes() for path in (self.source, *sorted(HEADERS.glob("*.h"))))
        digest = hashlib.sha256(sources + "\n".join(told).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgauge"
        target = cache / f"{self.name}-{digest}.so"
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = Path(folder) / target.name
                command = [compiler, *flags, f"-I{HEADERS}", *(f"-isystem{i}" for i in includes), str(self.source)]
                command += ["-o", str(made), *libraries]
                for standard in ("c++20", "c++17"):  # What torch's headers want has changed between versions.
                    done = subprocess.run([*command, f"-std={standard}"], capture_output=True, text=True)
                    if done.returncode == 0:
                        break
                else:
                    raise RuntimeError(f"{compiler} failed: {done.stderr[:500]}")
                made.replace(target)
        return target

    def imported(self, path: Path):
        loader = ExtensionFileLoader(self.name, str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(self.name, loader))
        loader.exec_module(module)
        return module


def plain_launch(compiled) -> tuple[int, int, int]:
    """(function, threads, bytes of shared memory); ValueError for what a plain launch cannot express."""
    data = compiled.metadata
    plain = (
        getattr(data, "num_ctas", 1) == 1
        and not getattr(data, "launch_pdl", False)
        and not getattr(data, "launch_cooperative_grid", False)
        and not getattr(data, "global_scratch_size", 0)
        and not getattr(data, "profile_scratch_size", 0)
    )
    if not plain:
        raise ValueError(f"needs more than a plain launch: {data}")
    return compiled.function, 32 * data.num_warps, data.shared


def cuda_addresses(*names: str) -> tuple[int, ...]:
    """The addresses of functions of the CUDA driver or of libtorch_cuda."""
    libraries = {
        True: ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")),
        False: ctypes.CDLL("libcuda.so.1"),
    }
    functions = (getattr(libraries[name.startswith("aoti_")], name) for name in names)
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def cuda_context() -> int:
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0
