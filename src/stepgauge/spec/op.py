"""A person's own function as it is asked for: what `bench op` measures."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from stepgauge.spec.fields import check, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A function of a Python file or of a CUDA source, and how long it is timed.

    content  a digest of the file: another version of it is another row
    """

    kind: ClassVar[str] = "op"

    file: str
    function: str = dataclasses.field(metadata={"label": True, "named_with": "file"})
    content: str
    tolerance: float = option(
        0.0, "largest relative error called right; 0: by the result's type", least=0.0, most=1.0
    )
    seconds: float = option(0.5, "of timing", least=0.0, most=3600.0)
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)


def read_target(target: str) -> tuple[Path, str]:
    """FILE.py:function or FILE.cu[:function] taken apart; a .cu's function is its own name unless
    given.

    Raises ValueError for anything else, or a file that is not there.
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
            f"{path} needs {path.with_suffix('.py').name} beside it, which defines inputs(device)"
        )
    return path, function or path.stem
