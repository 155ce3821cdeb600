"""A person's own Python file as a module."""

import contextlib
import importlib.util
import sys
import traceback
import types
from pathlib import Path


def load_file(path: Path) -> types.ModuleType:
    """The file, run as a module that may import its neighbours meanwhile. Raises ValueError where
    it cannot be, with the line.

    It is known by a name of ours, so that a file called json.py takes no other module's place, and
    meanwhile sys.argv is its own: a file that parses the command line gets none of ours. What it
    prints goes to standard error: standard output has the tables.
    """
    imported = importlib.util.spec_from_file_location(f"own_file_{path.stem}", path.resolve())
    assert imported is not None and imported.loader is not None
    module = importlib.util.module_from_spec(imported)
    # dataclasses, pickle and compilers look their module up there
    sys.modules[imported.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    before, sys.argv = sys.argv, [str(path)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            imported.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[imported.name]
        raise ValueError(
            f"{path} cannot be imported: {_line(error, path)}{type(error).__name__}: {error}"
        ) from error
    finally:
        sys.argv = before
        sys.path.remove(str(path.resolve().parent))
    return module


def own_names(module: types.ModuleType) -> list[str]:
    """Functions and classes that the file defines, without what it imports and what is private."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        if callable(value)
    ]


def _line(error: BaseException, path: Path) -> str:
    """ "line 3: " of the file, the last that the error went through; nothing where it has none."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the line
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return f"line {lines[-1]}: " if lines else ""


def user_line(trace: str, path: Path) -> str:
    """Where a traceback last went through the file's folder: "model.py:12"; else nothing."""
    folder = f'  File "{path.resolve().parent}/'
    lines = [line for line in trace.splitlines() if line.startswith(folder)]
    inside = [line for line in lines if "site-packages" not in line]
    if not inside:
        return ""
    file, number = inside[-1].split('"')[1], inside[-1].split("line ")[1].split(",")[0]
    return f"{Path(file).name}:{number}"
