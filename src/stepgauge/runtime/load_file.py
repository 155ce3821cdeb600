"""Imports a user's Python file as a module."""

import contextlib
import importlib.util
import sys
import traceback
import types
from pathlib import Path
from typing import Any


def load_file(path: Path) -> types.ModuleType:
    """Imports the file; it may import modules from its own folder. Raises ValueError on failure.

    The module is registered under a special name, so that a file called json.py does not replace
    another module. During the import sys.argv is just the file, in case it parses the command line,
    and what it prints goes to standard error, because standard output is for tables.
    """
    spec = importlib.util.spec_from_file_location(f"own_file_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses, pickle and compilers look up their module there.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    before, sys.argv = sys.argv, [str(path)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(
            f"{path} cannot be imported: {_line(error, path)}{type(error).__name__}: {error}"
        ) from error
    finally:
        sys.argv = before
        sys.path.remove(str(path.resolve().parent))
    return module


def own_names(module: types.ModuleType) -> list[str]:
    """Returns the public functions that the file defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        if callable(value) and not isinstance(value, type)
    ]


def _line(error: BaseException, path: Path) -> str:
    """Returns the last line of the file in the error's traceback as "line 3: ", or ""."""
    if isinstance(error, SyntaxError):
        return ""  # its message contains the line
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return f"line {lines[-1]}: " if lines else ""


def user_line(trace: str, source: Any) -> str:
    """Returns the last place in a traceback that is in the folder of the user's file, as
    "model.py:12", or "" if there is none or if `source` has no `file`, as the spec of a preset.
    """
    if not getattr(source, "file", ""):
        return ""
    folder = f'  File "{Path(source.file).resolve().parent}/'
    lines = [line for line in trace.splitlines() if line.startswith(folder)]
    own = [line for line in lines if "site-packages" not in line]
    if not own:
        return ""
    file, number = own[-1].split('"')[1], own[-1].split("line ")[1].split(",")[0]
    return f"{Path(file).name}:{number}"
