"""A person's own Python file as a module."""

import importlib.util
import sys
import types
from pathlib import Path


def load_file(path: Path) -> types.ModuleType:
    """The file, run as a module that may import its neighbours meanwhile. Raises ValueError where
    it cannot be.

    It is known by a name of ours, so that a file called json.py takes no other module's place.
    """
    imported = importlib.util.spec_from_file_location(f"own_file_{path.stem}", path.resolve())
    assert imported is not None and imported.loader is not None
    module = importlib.util.module_from_spec(imported)
    # dataclasses, pickle and compilers look their module up there
    sys.modules[imported.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        imported.loader.exec_module(module)
    except Exception as error:
        del sys.modules[imported.name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
