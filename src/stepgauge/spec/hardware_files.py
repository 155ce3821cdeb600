"""Where hardware files lie, which one has a name, and which one is of a device.

Files of the working folder's hardware/ come first, then those of the user: there `calibrate` writes
without being told where. Last come those of the package, which are meant by their names alone.
"""

import os
from pathlib import Path

from stepgauge.spec.hardware import SHIPPED, HardwareFile


def user_folder() -> Path:
    """As the XDG base directory specification has it."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "stepgauge" / "hardware"


def default_path(device: str) -> Path:
    """Of the file that `calibrate` writes of a device of that name: "amd-epyc.json"."""
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return user_folder() / f"{'-'.join(words) or 'device'}.json"


def known_files() -> list[Path]:
    """Those of the working folder and of the user, in the order in which they count."""
    return [
        path
        for folder in (Path("hardware"), user_folder())
        if folder.is_dir()
        for path in sorted(folder.glob("*.json"))
    ]


def file_named(text: str) -> Path:
    """The file of a path, or of a name: "dgx-h100". Raises ValueError where there is none."""
    path = Path(text)
    if path.is_file():
        return path
    every = [*known_files(), *sorted(SHIPPED.glob("*.json"))]
    if path.parent == Path():
        for known in every:
            if path.name in (known.stem, known.name):
                return known
    names = dict.fromkeys(known.stem for known in every if _has_times(known))
    near = [name for name in names if path.name and path.name in name]
    raise ValueError(
        f"no hardware file at {text}: "
        + (f"did you mean {' or '.join(near)}? " if near else "")
        + f"stepgauge calibrate FILE makes one of this machine; by name there are {', '.join(names)}"
    )


def _has_times(path: Path) -> bool:
    """Whether steps can be predicted from the file: from its own operations or another's."""
    try:
        hardware = HardwareFile.read(path)
    except ValueError:
        return False
    return bool(hardware.operations or hardware.base)


def file_of(device: str, threads: int) -> Path | None:
    """The first calibrated file of a device of that name, of a CPU with so many threads; None
    without one.
    """
    for path, hardware in calibrated_files().items():
        if hardware.device == device and hardware.threads in (0, threads):
            return path
    return None


def calibrated_files() -> dict[Path, HardwareFile]:
    """Of the known files; what is no hardware file is passed over."""
    found = {}
    for path in known_files():
        try:
            hardware = HardwareFile.read(path)
        except ValueError:
            continue
        if hardware.operations:
            found[path] = hardware
    return found
