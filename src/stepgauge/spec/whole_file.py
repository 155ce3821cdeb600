"""Writes a file as a whole or not at all."""

import contextlib
import os
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Returns the temporary file in the same folder that is renamed to `path` once it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_whole(path: Path, text: str) -> None:
    """Writes the file atomically; of a symbolic link, the file that it points to.

    Raises OSError if that fails; an earlier file then stays as it was, and no draft. A pipe or a device
    is not replaced but written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    draft = draft_of(path)
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:  # also Ctrl-C
        with contextlib.suppress(OSError):  # report the first error
            draft.unlink(missing_ok=True)
        raise
