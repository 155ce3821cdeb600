"""Finds hardware files by path, by name or by device.

Files in hardware/ of the working folder come first, then those in the user's folder, where
`calibrate` writes by default. Last come the files of the package, which are found only by name.
"""

import os
from pathlib import Path

from stepgauge.spec.hardware import SHIPPED, HardwareFile


def user_folder() -> Path:
    """Returns the user's folder of hardware files, by the XDG base directory specification."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "stepgauge" / "hardware"


def default_path(device: str) -> Path:
    """Returns the path that `calibrate` writes to for a device name: ".../amd-epyc.json"."""
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return user_folder() / f"{'-'.join(words) or 'device'}.json"


def known_files() -> list[Path]:
    """Returns the files of the working folder, then those of the user."""
    return [
        path
        for folder in (Path("hardware"), user_folder())
        if folder.is_dir()
        for path in sorted(folder.glob("*.json"))
    ]


def file_named(text: str) -> Path:
    """Returns the file with this path or name, such as "dgx-h100".

    Raises ValueError, with similar names, if there is none.
    """
    path = Path(text)
    if path.is_file():
        return path
    if path.parent == Path():
        for file in _named_files():
            if path.name in (file.stem, file.name):
                return file
    names = names_to_predict_for()
    similar = [name for name in names if path.name and path.name in name]
    raise ValueError(
        f"no hardware file at {text}: "
        + (f"did you mean {' or '.join(similar)}? " if similar else "")
        + f"known names are {', '.join(names)}; stepgauge calibrate makes a file of this machine"
    )


def names_to_predict_for() -> list[str]:
    """Returns the names of the files from which a step can be predicted."""
    return list(dict.fromkeys(file.stem for file in _named_files() if _can_predict(file)))


def _named_files() -> list[Path]:
    return [*known_files(), *sorted(SHIPPED.glob("*.json"))]


def _can_predict(path: Path) -> bool:
    """Returns True if the file has operation times, its own or those of its base."""
    try:
        hardware = HardwareFile.read(path)
    except ValueError:
        return False
    return bool(hardware.operations or hardware.base)


def file_of(device: str, threads: int) -> Path | None:
    """Returns the first calibrated file of the device, or None.

    threads  for a CPU: the file must be for this number of threads
    """
    for path, hardware in calibrated_files().items():
        if hardware.device == device and hardware.threads in (0, threads):
            return path
    return None


def calibrated_files() -> dict[Path, HardwareFile]:
    """Returns the known files that have operation times; invalid files are skipped."""
    calibrated = {}
    for path in known_files():
        try:
            hardware = HardwareFile.read(path)
        except ValueError:
            continue
        if hardware.operations:
            calibrated[path] = hardware
    return calibrated
