"""A C++ file as a shared library, compiled against torch where it runs and kept in the user's cache.

The compiler is called directly: torch.utils.cpp_extension needs ninja, and would leave a lock behind
if the process ended during the build. Here the result is moved into place in one step: two processes
that compile the same at once make the same.
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
STANDARDS = ("c++20", "c++17")  # what torch's headers want has changed between versions
LIMIT_S = 300  # of one run of the compiler


class BuildError(RuntimeError):
    """Why there is no library, in one sentence."""


def shared_library(source: Path, *, name: str) -> Path:
    """The library, from the cache or compiled now. Raises BuildError without a compiler, and where
    compiling fails.
    """
    command = _command(source)
    told = "\n".join([*command, torch.__version__, sys.version]).encode()
    digest = hashlib.sha256(source.read_bytes() + told).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgauge"
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(command, library)
    return library


def _compile(command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        for standard in STANDARDS:
            try:
                done = subprocess.run(
                    [*command, f"-std={standard}", "-o", str(made)],
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{command[0]}: {error}") from None
            if done.returncode == 0:
                made.replace(library)
                return
    raise BuildError(f"{command[0]} failed: {done.stderr.strip()[:500]}")


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
    """The command, of the variable CXX if it is set."""
    asked = shlex.split(os.environ.get("CXX", ""))
    names = asked[:1] or COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"no C++ compiler: there is no {', '.join(names)}")
    return [found, *asked[1:]]
