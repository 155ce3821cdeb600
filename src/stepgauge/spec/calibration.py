"""What a calibration measures: single operations over a grid of shapes, as tables of times."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from stepgauge.spec.comm import OPS
from stepgauge.spec.fields import check, option
from stepgauge.spec.layout import Layout

# Ends the name of a product's second table: of calls that nothing else ran between.
ALONE = "alone"
# Ends the name of a table of shapes that certain steps have, which were timed for them.
ASKED = "asked"

# Calls that were traced, each at its own arguments.
OPERATORS = "operators"

# Products of as many pairs of matrices as the first size says: "matmul batched nt bf16".
BATCHED = "batched "
# One product for each of as many experts as the first size says; the rows are those of all.
GROUPED = "grouped "

# Ends the name of an attention whose queries see all keys: "attention sdpa-full forward bf16".
FULL_MASK = "-full"


@dataclasses.dataclass(frozen=True)
class OperationTable:
    """Times of one operation.

    axes       what the sizes of a row are: ("m", "n", "k") of a product
    rows       sizes, then microseconds
    captured   short calls ran as CUDA graphs, so that no time is the host's
    disturbed  other work had cores that the measurement needed
    """

    axes: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    captured: bool = False
    disturbed: bool = False

    def at(self, other: "OperationTable") -> "OperationTable":
        """The rows of sizes that the other has, too."""
        sizes = {row[:-1] for row in other.rows}
        return dataclasses.replace(self, rows=tuple(r for r in self.rows if r[:-1] in sizes))

    def to_dict(self) -> dict[str, Any]:
        said = {name: True for name in ("captured", "disturbed") if getattr(self, name)}
        return {"axes": list(self.axes), "rows": [list(row) for row in self.rows], **said}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """What to_dict gives. Raises ValueError for what is no table."""
        try:
            axes, rows = tuple(value["axes"]), tuple(tuple(row) for row in value["rows"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a table of an operation: {error}") from None
        if not rows or any(len(row) != len(axes) + 1 for row in rows):
            raise ValueError(f"not a table of an operation: rows need {len(axes)} sizes and a time")
        return cls(axes, rows, bool(value.get("captured")), bool(value.get("disturbed")))


@dataclasses.dataclass(frozen=True)
class Contention:
    """What a class of kernels and a collective cost each other while both run: of each, its time
    beside the other over its time alone, 1.0 where they do not meet.

    kernels     a name of KERNEL_CLASSES
    collective  as bench comm names it: all_reduce
    ranks       that it was between; 0: older files do not tell
    """

    kernels: str
    collective: str
    kernel_slowdown: float
    collective_slowdown: float
    ranks: int = 0

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Of the fields in their order. Raises ValueError for what is no row of four values, or five
        with the ranks.
        """
        try:
            kernels, collective, kernel_slowdown, collective_slowdown, *ranks = row
            (between,) = ranks or (0,)
            return cls(str(kernels), str(collective), float(kernel_slowdown),
                       float(collective_slowdown), int(between))  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a row of the contention table: {error}") from None


# Kernels that contend alike: products, of which short ones have few waves of tiles and lose a whole
# wave to the multiprocessors that a collective takes; attention; all that only passes over memory.
KERNEL_CLASSES = ("matmul", "short-matmul", "attention", "traffic")
# Beside an all-reduce on 2 x H200 products of 93 us took 1.6 and 1.9 times as long, longer ones
# 1.1 to 1.4 times (docs/log/2026-11-23-fresh-rows.md).
SHORT_PRODUCT_US = 150.0


def kernel_class(operation: str, us: float = math.inf) -> str:
    """Of one that takes so long: "matmul nt bf16" is of class "matmul", "rmsnorm forward fp32" of
    "traffic".
    """
    first = operation.partition(" ")[0]
    if first == "matmul" and us < SHORT_PRODUCT_US:
        return "short-matmul"
    return first if first in KERNEL_CLASSES else "traffic"


# Wrappers whose host time is measured on ranks, and the phases of their step by number in the table:
# tables of 2026-11-23 and before have a 2, a wait that is part of backward now.
CALIBRATED_WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
WRAPPER_PHASES = {"forward": 0, "backward": 1, "optimizer": 3}


def wrapper_operation(wrapper: str) -> str:
    """The name of the table that says what the wrapper takes of the host."""
    return f"host wrapper {wrapper}"


# Checkpointing that asks of each operator whether its result is kept, which the host pays for.
KEEPING = ("selective", "feed-forward")


def launched_under(layout: Layout, checkpointing: str) -> str:
    """Ends the name of a table of the host: " dp2 zero3 keeping selective"; "" for one process that
    keeps all, or runs blocks again as they were.
    """
    cut = layout.launched
    said = f" {cut}" if cut.ranks > 1 else ""
    return said + (f" keeping {checkpointing}" if checkpointing in KEEPING else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSpec:
    """What `calibrate` measures in one record: an operation in a type, over all shapes."""

    kind: ClassVar[str] = "calibration"

    operation: str = option("matmul nt bf16", "operation and type", label=True)
    milliseconds: float = option(4.0, "of work that each shape is timed for", least=0.0, most=1e4)
    seconds: float = option(
        20.0, "for all shapes; those that are left are left out", least=0.0, most=1e4
    )
    sizes: str = option("", "shapes in place of the usual ones: '4096x1024 4096x2560'")
    turn: int = option(0, "times measured again: the number of the row that it precedes", least=0)
    bucket_mb: float = option(25.0, "of the host's wrapper, as the narrow network's", least=0.0)
    ranks: int = option(1, "that time it side by side", least=1, most=4096, label="changed")
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """Those of `sizes`; of OPERATORS each is a call."""
        if self.operation == OPERATORS:
            return [(call,) for call in json.loads(self.sizes or "[]")]
        return [tuple(map(int, shape.split("x"))) for shape in self.sizes.split()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentionSpec:
    """What `calibrate` measures in one record: a class of kernels and a collective side by side."""

    kind: ClassVar[str] = "contention"

    kernels: str = option("matmul", "class of kernels", choices=KERNEL_CLASSES, label=True)
    collective: str = option("all_reduce", "as bench comm names it", choices=OPS, label=True)
    size_bytes: int = option(32 * 2**20, "of the collective", least=1, most=2**40)
    milliseconds: float = option(50.0, "that each runs beside the other", least=0.0, most=1e4)
    ranks: int = option(2, "processes", least=2, most=4096, label=True)
    device: str = option("cpu", "cpu, or cuda for one GPU a rank")

    def __post_init__(self) -> None:
        check(self)
