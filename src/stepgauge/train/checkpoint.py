"""Checkpoints in torch.distributed.checkpoint's format, which are either complete or ignored.

A checkpoint is written to a temporary folder. The sizes and checksums of its files are written to a
manifest, everything is forced to disk, and only then the folder is renamed. Reading verifies the
manifest, so that a folder that was damaged later (a full disk, an incomplete copy) is skipped, too.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from stepgauge.spec.first_names import first_names

MANIFEST = "manifest.json"
PARTIAL = ".partial"
MOST_NAMED = 4  # fields that the message about another run's checkpoint names


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, a folder each, named by step."""

    folder: Path

    def save(self, step: int, state: dict[str, Any], about: dict[str, Any], *, keep: int) -> Path:
        """Writes the state as the checkpoint of that step, then removes all checkpoints but the
        newest `keep` up to it.

        Checkpoints of later steps are removed as well: they must be damaged, because otherwise
        training would have resumed from them. Raises CheckpointError if it cannot be written.
        """
        final, partial = self._paths(step)
        with self._writing(final, partial):
            shutil.rmtree(partial, ignore_errors=True)
            with warnings.catch_warnings(action="ignore"):  # torch warns of a single process
                state_dict_saver.save(state, checkpoint_id=partial, no_dist=True)
            self._complete(step, about)
        self._remove_others(final, keep)
        return final

    def save_shares(
        self, step: int, share: dict[str, Any], about: dict[str, Any], *, keep: int
    ) -> None:
        """Saves like `save`, but each rank writes its own share of the state, to a folder that all
        ranks see. All ranks must call it.
        """
        final, partial = self._paths(step)
        is_first = dist.get_rank() == 0
        with self._writing(final, partial):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier()
            with warnings.catch_warnings(action="ignore"):
                state_dict_saver.save(share, checkpoint_id=partial)
            if is_first:
                self._complete(step, about)
        if is_first:
            self._remove_others(final, keep)

    def _paths(self, step: int) -> tuple[Path, Path]:
        """Returns the checkpoint's folder, and the one in which it is written."""
        final = self.folder / f"step-{step:09d}"
        return final, final.with_suffix(PARTIAL)

    @contextlib.contextmanager
    def _writing(self, final: Path, partial: Path) -> Iterator[None]:
        """Removes the partial folder and raises CheckpointError if writing fails."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {final}: {_first_line(error)}"
            ) from None

    def _complete(self, step: int, about: dict[str, Any]) -> None:
        """Writes the manifest, forces everything to disk and renames the folder."""
        final, partial = self._paths(step)
        files = {path.name: _fingerprint(path) for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(
            json.dumps({"step": step, "about": about, "files": files}, indent=1)
        )
        for path in [*partial.iterdir(), partial]:
            _force_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _force_to_disk(self.folder)

    def _remove_others(self, final: Path, keep: int) -> None:
        """Removes all folders but the newest `keep` checkpoints up to `final`."""
        kept = [folder for folder in self._folders() if folder.name <= final.name][:keep]
        for folder in {*self._folders(), *self.folder.glob(f"*{PARTIAL}")} - set(kept):
            shutil.rmtree(folder)

    def newest(self) -> Iterator[tuple[int, Path, dict[str, Any]]]:
        """Yields (step, folder, about) of complete checkpoints, newest first, and warns of damaged
        ones.
        """
        for folder in self._folders():
            try:
                manifest = json.loads((folder / MANIFEST).read_text())
                is_complete = all(
                    _fingerprint(folder / name) == mark for name, mark in manifest["files"].items()
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                is_complete = False
            if is_complete:
                yield manifest["step"], folder, manifest["about"]
            else:
                warnings.warn(f"checkpoint {folder} is incomplete and is skipped", stacklevel=2)

    def last_step(self) -> int:
        """Returns the step of the newest checkpoint by its folder's name; 0 if there is none."""
        return max((int(p.name.removeprefix("step-")) for p in self._folders()), default=0)

    def load(self, folder: Path) -> dict[str, Any]:
        """Returns the state of a checkpoint, with tensors in host memory."""
        return _read(FileSystemReader(folder))

    def open(self, folder: Path) -> dict[str, Any]:
        """Returns the state of a checkpoint, with model and optimizer state read lazily, one value at
        a time: a rank reads only the values that it needs.
        """
        reader = _Reader(folder)
        state = _read(reader, {"optimizer.param_groups", "scaler"})
        state["model"] = StoredValues(reader, ("model",))
        state["optimizer"]["state"] = StoredValues(reader, ("optimizer", "state"))
        return state

    def _folders(self) -> list[Path]:
        """Returns the checkpoints' folders, newest first."""
        return sorted((p for p in self.folder.glob("step-*") if p.suffix != PARTIAL), reverse=True)


class _Reader(FileSystemReader):
    """A reader that caches the checkpoint's metadata."""

    cached: Metadata | None = None

    def read_metadata(self, *arguments: Any, **settings: Any) -> Metadata:
        if self.cached is None:
            self.cached = super().read_metadata(*arguments, **settings)
        return self.cached


class StoredValues(Mapping[str, Any]):
    """The values under a path of a checkpoint, by name. Each access reads from disk."""

    def __init__(self, reader: FileSystemReader, path: tuple[str, ...]):
        self._reader, self._path = reader, path
        stored = reader.read_metadata().planner_data.values()
        names = (each[len(path)] for each in stored if each[: len(path)] == path)
        self._names = list(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        value = _read(self._reader, {".".join((*self._path, name))})
        for key in (*self._path, name):
            value = value[key]
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read(reader: FileSystemReader, keys: set[str] | None = None) -> Any:
    """Returns the checkpoint's state, or only the values under some dotted paths."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader._load_state_dict(
            state, reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True
        )
    return state


def require_same(about: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError, naming the fields, if a checkpoint is not of the run that would resume
    from it.
    """
    names = sorted({name for name in (*about, *wanted) if about.get(name) != wanted.get(name)})
    if names:
        changes = [f"{name} {about.get(name)} there, {wanted.get(name)} here" for name in names]
        raise CheckpointError(
            f"checkpoint {folder} is of another run: {first_names(changes, MOST_NAMED)}, which change "
            f"the loss curve; use the same values, or choose another --out"
        )


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error, or of the first failure that torch collected."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _fingerprint(path: Path) -> list[int]:
    """Returns a file's size and CRC-32, which reveal truncation and bit rot but not tampering."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
