"""Compiles a C++ file against torch into a shared library, and keeps it in the user's cache.

The compiler is called directly, because torch.utils.cpp_extension needs ninja and leaves a lock
behind if the process ends during the build. Here the library is moved into place atomically, so
that two processes may build the same one at the same time.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

COMPILERS = ("c++", "g++", "clang++")
STANDARDS = ("c++20", "c++17")  # tried in order: torch versions need different ones
LIMIT_S = 300  # for one run of the compiler


class BuildError(RuntimeError):
    """The library could not be built; the message is one sentence."""


def shared_library(source: Path, *, name: str) -> Path:
    """Returns the path of the library, from the cache or newly compiled.

    Raises BuildError if there is no compiler or compiling fails.
    """
    command = _command(source)
    settings = "\n".join([*command, torch.__version__, sys.version]).encode()
    digest = hashlib.sha256(source.read_bytes() + settings).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgauge"
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(command, library)
    return library


def _compile(command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        for standard in STANDARDS:
            try:
                result = subprocess.run(
                    [*command, f"-std={standard}", "-o", str(output)],
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{command[0]}: {error}") from None
            if result.returncode == 0:
                output.replace(library)
                return
    raise BuildError(f"{command[0]} failed: {result.stderr.strip()[:500]}")


def _command(source: Path) -> list[str]:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    system = [
        root / "include",
        root / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    flags = ["-O2", "-fPIC", "-shared", abi, *(f"-isystem{path}" for path in system)]
    return [*_compiler(), *flags, str(source), *libraries]


def _compiler() -> list[str]:
    """Returns the compiler's command: that of the environment variable CXX if it is set."""
    command = shlex.split(os.environ.get("CXX", ""))
    names = command[:1] or COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise BuildError(f"no C++ compiler: there is no {', '.join(names)}")
    return [path, *command[1:]]
