"""The spec of `bench op`: a user's own function."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from stepgauge.spec.fields import DEVICE_HELP, check, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A function in a Python file or a CUDA source, and how long it is timed.

    content  digest of the file, so that each version of it is a separate row
    """

    kind: ClassVar[str] = "op"

    file: str
    function: str = dataclasses.field(metadata={"label": True, "named_with": "file"})
    content: str
    tolerance: float = option(
        0.0, "Largest accepted relative error; 0: by the dtype of the result", least=0.0, most=1.0
    )
    seconds: float = option(0.5, "Seconds of timing", least=0.0, most=3600.0)
    device: str = option("cpu", DEVICE_HELP)

    def __post_init__(self) -> None:
        check(self)


def read_target(target: str) -> tuple[Path, str]:
    """Splits FILE.py:function or FILE.cu[:function]; the default function of a .cu is its stem.

    Raises ValueError for any other text, or if a file is missing.
    """
    text, _, function = target.partition(":")
    path = Path(text)
    if path.suffix not in (".py", ".cu"):
        raise ValueError(f"target is {target!r}; give FILE.py:function or FILE.cu")
    if not path.is_file():
        raise ValueError(f"target is {target!r}; there is no file {path}")
    if path.suffix == ".py" and not function:
        raise ValueError(f"target is {target!r}; name the function: {path}:function")
    if path.suffix == ".cu" and not path.with_suffix(".py").is_file():
        raise ValueError(
            f"{path} needs {path.with_suffix('.py').name} in the same folder, which defines "
            "inputs(device)"
        )
    return path, function or path.stem
