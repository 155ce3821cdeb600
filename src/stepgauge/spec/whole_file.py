"""Writes a file as a whole or not at all."""

import contextlib
import os
import stat
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Returns the temporary file in the same folder that is renamed to `path` once it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_whole(path: Path, text: str) -> None:
    """Writes the file atomically; of a symbolic link, the file that it points to. An earlier file's
    permissions are kept, and its owner if this user may give files away.

    Raises OSError if that fails; an earlier file then stays as it was, and no draft. A pipe or a device
    is not replaced but written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    draft = draft_of(path)
    try:
        if path.exists():
            draft.touch(0o600)  # until it has the permissions, nobody else can read it
        draft.write_text(text, encoding="utf-8")
        if path.exists():
            _keep_permissions(path, draft)
        draft.replace(path)
    except BaseException:  # also Ctrl-C
        with contextlib.suppress(OSError):  # report the first error
            draft.unlink(missing_ok=True)
        raise


def _keep_permissions(path: Path, draft: Path) -> None:
    earlier = path.stat()
    with contextlib.suppress(OSError):  # only root may give files away
        os.chown(draft, earlier.st_uid, earlier.st_gid)
    draft.chmod(stat.S_IMODE(earlier.st_mode))
