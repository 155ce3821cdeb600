"""A person's own function as it is asked for: what `bench op` measures."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import check, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A function of a Python file or of a CUDA source, and how long it is timed.

    content  a digest of the file: another version of it is another row
    """

    kind: ClassVar[str] = "op"

    file: str
    function: str = dataclasses.field(metadata={"label": ("function", "file")})
    content: str
    tolerance: float = option(
        0.0, "largest relative error called right; 0: by the result's type", least=0.0, most=1.0
    )
    seconds: float = option(0.5, "of timing", least=0.0, most=3600.0)
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)
