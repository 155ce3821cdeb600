"""A run on disk: a folder with records.jsonl, one record per line, synced after every record."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from stepgauge.spec.predictions import without_predicted_metrics
from stepgauge.spec.record import OtherRowError, Record, now

FILE_NAME = "records.jsonl"
LOCK_NAME = "lock"
FAILURES = "failures.log"  # tracebacks of failed rows


class StoreError(Exception):
    """The run cannot be read or written; the message is one sentence for the user."""


class NoRunError(StoreError):
    """The folder does not contain a run."""


def is_records_file(path: Path) -> bool:
    """Returns True for a file of records outside a run's folder, such as those in benchmarks/results."""
    return path.suffix in (".jsonl", ".json") and path.is_file()


def _lines_of(data: bytes) -> list[bytes]:
    """Returns the lines of a file of records. A list, as --format json prints it, has one for each
    element.
    """
    if data.lstrip().startswith(b"["):
        with contextlib.suppress(ValueError):  # not a list: each line is reported
            return [json.dumps(element).encode() for element in json.loads(data)]
    return data.split(b"\n")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The valid records of a run, and one sentence per damaged line."""

    records: list[Record]
    problems: list[str]

    def latest(self) -> list[Record]:
        """Returns the last record of each identity, in the order of the first ones."""
        return list({record.identity: record for record in self.records}.values())


class RunStore:
    """Appends and reads the records of one run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME

    def require_possible(self) -> None:
        """Raises StoreError if the folder could not be created or written; creates nothing."""
        existing = next(
            path for path in (self.folder, *self.folder.absolute().parents) if path.exists()
        )
        if not existing.is_dir():
            raise StoreError(f"cannot write to {self.folder}: {existing} is a file, not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise StoreError(f"cannot write to {self.folder}: {os.strerror(errno.EACCES)}")

    def prepare(self) -> None:
        """Creates the folder and checks that it is writable. Raises StoreError if not."""
        self.require_possible()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error.strerror}") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Locks the run against other processes. Raises StoreError if another one holds it.

        If this created the folder and nothing was written, the folder is removed at the end.
        """
        is_new = not self.folder.exists()
        with self._locked():
            try:
                yield
            finally:
                if is_new:
                    self._remove_empty()

    def _locked(self) -> IO[str]:
        """Returns the lock file, which is locked until it is closed."""
        path = self.folder / LOCK_NAME
        while True:
            self.prepare()
            lock = path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise StoreError(f"the run at {self.folder} is in use by another process") from None
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                return lock
            lock.close()  # meanwhile another process has removed the file with its folder

    def _remove_empty(self) -> None:
        with contextlib.suppress(OSError):  # other files exist, or the folder is already gone
            names = {path.name for path in self.folder.iterdir()}
            if names <= {FILE_NAME, LOCK_NAME} and not self.path.stat().st_size:
                for name in names:
                    (self.folder / name).unlink()
                self.folder.rmdir()

    def append(self, record: Record) -> None:
        """Appends the record, dated now if it has no date, and syncs it to disk.

        If the disk is full, a partly written line is removed again. Raises StoreError with the
        record's JSON in `args[1]`, so that the caller can still show it.
        """
        line = dataclasses.replace(record, created=record.created or now()).to_json()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                self._append_line(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"cannot write a record to {self.path}: {error.strerror}", line
            ) from None

    def _append_line(self, descriptor: int, line: str) -> None:
        size = os.fstat(descriptor).st_size
        # If a power cut left an incomplete line, start a new one.
        is_incomplete = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        start = "\n" if is_incomplete else ""
        data = memoryview(f"{start}{line}\n".encode())
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # report the first error
                os.ftruncate(descriptor, size)
            raise

    def read(self) -> Contents:
        """Returns the valid records and the problems. The folder may also be a file of records, which
        is only read. Raises NoRunError if there is no run, or other rows only.
        """
        path = self.folder if is_records_file(self.folder) else self.path
        try:
            lines = _lines_of(path.read_bytes())
        except FileNotFoundError:
            raise NoRunError(f"no run at {self.folder}") from None
        except NotADirectoryError:
            raise NoRunError(
                f"{self.folder} is a file; name the folder of a run, or a .jsonl or .json file of records"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        return _contents(path, lines)


def _contents(path: Path, lines: Sequence[bytes]) -> Contents:
    """Reads the lines of the file. Raises NoRunError if all of them are rows of something else."""
    records: list[Record] = []
    problems: list[str] = []
    others: list[OtherRowError] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records += without_predicted_metrics(Record.from_json(line.decode()))
        except OtherRowError as error:
            others.append(error)
        except ValueError as error:
            problems.append(f"{path} line {number} is damaged and skipped: {error}")
    if others and not records and not problems:
        raise NoRunError(f"{path} holds no records of stepgauge but {others[0]}{_advice(path)}")
    if others:
        problems.append(f"{path}: {len(others)} of the lines are skipped: {others[0]}")
    return Contents(records, problems)


def _advice(path: Path) -> str:
    """Returns the end of a sentence on a file of other rows: what to do with it."""
    if path.suffix != ".jsonl":
        return ""
    return ": read it as lines of JSON, as a script (such as those in benchmarks/) wrote them"
