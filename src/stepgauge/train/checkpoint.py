"""Checkpoints in torch.distributed.checkpoint's format, whole or not there.

A checkpoint is written to a folder of another name, its files' sizes and checksums are noted in a
manifest, all of it is forced to disk, and only then the folder gets its name. Reading verifies the
manifest, so that a folder that was cut short later (a full disk, a broken copy) is passed over as
well.
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

MANIFEST = "manifest.json"
PARTIAL = ".partial"
NAMED = 4  # fields in which two runs differ


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, a folder each, named by step."""

    folder: Path

    def save(self, step: int, state: dict[str, Any], about: dict[str, Any], *, keep: int) -> Path:
        """Writes the state as the checkpoint of that step, then removes all but the newest `keep`
        up to it.

        What is newer is damaged, or this step would not have been trained again: it goes too.
        Raises CheckpointError if it cannot be written.
        """
        final, partial = self._paths(step)
        with self._failing(final, partial):
            shutil.rmtree(partial, ignore_errors=True)
            with warnings.catch_warnings(action="ignore"):  # of one process that saves alone
                state_dict_saver.save(state, checkpoint_id=partial, no_dist=True)
            self._complete(step, about)
        self._remove_older(final, keep)
        return final

    def save_shares(
        self, step: int, share: dict[str, Any], about: dict[str, Any], *, keep: int
    ) -> None:
        """The same of a state of which each rank has its share, which it writes itself, to a folder
        that all ranks see. All ranks must call it.
        """
        final, partial = self._paths(step)
        is_first = dist.get_rank() == 0
        with self._failing(final, partial):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier()
            with warnings.catch_warnings(action="ignore"):
                state_dict_saver.save(share, checkpoint_id=partial)
            if is_first:
                self._complete(step, about)
        if is_first:
            self._remove_older(final, keep)

    def _paths(self, step: int) -> tuple[Path, Path]:
        final = self.folder / f"step-{step:09d}"
        return final, final.with_suffix(PARTIAL)

    @contextlib.contextmanager
    def _failing(self, final: Path, partial: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {final}: {_first_line(error)}"
            ) from None

    def _complete(self, step: int, about: dict[str, Any]) -> None:
        """Notes what was written, forces it to disk and gives the folder its name."""
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

    def _remove_older(self, final: Path, keep: int) -> None:
        older = [folder for folder in self._folders() if folder.name <= final.name]
        for folder in {*self._folders(), *self.folder.glob(f"*{PARTIAL}")} - set(older[:keep]):
            shutil.rmtree(folder)

    def newest(self) -> Iterator[tuple[int, Path, dict[str, Any]]]:
        """(step, folder, about) of whole checkpoints, newest first; warns of each that is damaged."""
        for folder in self._folders():
            try:
                manifest = json.loads((folder / MANIFEST).read_text())
                whole = all(
                    _fingerprint(folder / name) == mark for name, mark in manifest["files"].items()
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                whole = False
            if whole:
                yield manifest["step"], folder, manifest["about"]
            else:
                warnings.warn(f"checkpoint {folder} is not whole and is passed over", stacklevel=2)

    def last_step(self) -> int:
        """Of the newest checkpoint, by its folder's name; 0 where there is none."""
        return max((int(p.name.removeprefix("step-")) for p in self._folders()), default=0)

    def load(self, folder: Path) -> dict[str, Any]:
        """The state of a checkpoint, its tensors on the host."""
        return _read(FileSystemReader(folder))

    def open(self, folder: Path) -> dict[str, Any]:
        """The same, but that model and optimizer state are read name by name, when they are asked
        for: a rank that needs some of it reads no more, and holds one value at a time.
        """
        reader = _Reader(folder)
        state = _read(reader, {"optimizer.param_groups", "scaler"})
        state["model"] = StoredValues(reader, ("model",))
        state["optimizer"]["state"] = StoredValues(reader, ("optimizer", "state"))
        return state

    def _folders(self) -> list[Path]:
        """Newest first."""
        return sorted((p for p in self.folder.glob("step-*") if p.suffix != PARTIAL), reverse=True)


class _Reader(FileSystemReader):
    """Reads the list of what is stored once, not again for each name."""

    stored: Metadata | None = None

    def read_metadata(self, *arguments: Any, **settings: Any) -> Metadata:
        if self.stored is None:
            self.stored = super().read_metadata(*arguments, **settings)
        return self.stored


class StoredValues(Mapping[str, Any]):
    """What stands under a path in a checkpoint, by name; each access reads it."""

    def __init__(self, reader: FileSystemReader, path: tuple[str, ...]):
        self._reader, self._path = reader, path
        stored = reader.read_metadata().planner_data.values()
        found = (each[len(path)] for each in stored if each[: len(path)] == path)
        self._names = list(dict.fromkeys(found))

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
    """A checkpoint, or what stands under some dotted paths of it."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader._load_state_dict(
            state, reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True
        )
    return state


def require_same(about: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError that names the fields in which a checkpoint differs from the run that
    wants it.
    """
    names = sorted({name for name in (*about, *wanted) if about.get(name) != wanted.get(name)})
    if names:
        changes = ", ".join(
            f"{name} {about.get(name)} there, {wanted.get(name)} here" for name in names[:NAMED]
        )
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise CheckpointError(
            f"checkpoint {folder} is of another run: {changes}{more}, which change its loss curve; ask for "
            f"the same, or choose another --out"
        )


def _first_line(error: BaseException) -> str:
    """What torch's collected failures say in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file: enough against cuts and bit rot, not against malice."""
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
