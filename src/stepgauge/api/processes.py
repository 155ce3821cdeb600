"""Processes that are started from a user's script or notebook."""

import contextlib
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that start while the block runs do not run the user's script again.

    multiprocessing would, to find what it defines; a script without `if __name__ == "__main__"`
    then starts itself without end. What we send there is defined in modules.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
