"""Specs and tables of a calibration: times of single operations over a grid of shapes."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from stepgauge.spec.comm import COPIED, COPIED_OPS, OPS
from stepgauge.spec.fields import DEVICE_HELP, check, option
from stepgauge.spec.layout import Layout

# Suffix of a second table of matrix products, timed back to back, and of attention, timed between products:
# without passes over memory, during which the clock rises.
ALONE = "alone"
# Suffix of a table of exactly the shapes that some steps use, timed for their predictions.
EXACT = "exact"
# The gap before a kernel that the host launches, beyond that in a CUDA graph of equal kernels.
LAUNCH_GAP = "launch gap"

# The table of traced operator calls, each timed with its own arguments.
OPERATORS = "operators"

# Batched products; the first size is the batch: "matmul batched nt bf16".
BATCHED = "batched "
# Grouped products, one per expert: the first size is the number of experts, m the rows of all.
GROUPED = "grouped "

# Products in 16 bits are fast if widths are multiples of this, so that rows start at multiples of 16 bytes.
# Others, by the largest power of two that divides their widths: "matmul 2-byte nt bf16".
ALIGNED = 8
ALIGNMENTS = {1: "2-byte ", 2: "4-byte ", 4: "4-byte "}

# Suffix of attention without a causal mask: "attention sdpa-full forward bf16".
FULL_MASK = "-full"


@dataclasses.dataclass(frozen=True)
class OperationTable:
    """Times of one operation.

    axes       names of the sizes in a row: ("m", "n", "k") for a matrix product
    rows       sizes, then microseconds
    captured   short calls ran in CUDA graphs, so that the times contain no launch overhead
    disturbed  other work took cores that the measurement needed
    left_out   number of shapes without a time: they did not fit in memory, or the time limit was over
    libraries  other packages that ran its longest shapes: "cuDNN and FlashAttention-4"
    """

    OPTIONAL: ClassVar = ("captured", "disturbed", "left_out", "libraries")

    axes: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    captured: bool = False
    disturbed: bool = False
    left_out: int = 0
    libraries: str = ""

    @property
    def has_few(self) -> bool:
        """True if most shapes have no time, so that most sizes are extrapolated."""
        return self.left_out > len(self.rows)

    @property
    def timed(self) -> str:
        """How many of the shapes have a time: "4 of 58"."""
        return f"{len(self.rows)} of {len(self.rows) + self.left_out}"

    def at(self, other: "OperationTable") -> "OperationTable":
        """Returns the table reduced to the sizes that the other table has, too."""
        sizes = {row[:-1] for row in other.rows}
        return dataclasses.replace(self, rows=tuple(r for r in self.rows if r[:-1] in sizes))

    def to_dict(self) -> dict[str, Any]:
        kept = {name: value for name in self.OPTIONAL if (value := getattr(self, name))}
        return {"axes": list(self.axes), "rows": [list(row) for row in self.rows], **kept}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads the output of `to_dict`. Raises ValueError if it is not a table."""
        try:
            axes, rows = tuple(value["axes"]), tuple(tuple(row) for row in value["rows"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an operation table: {error}") from None
        if not rows or any(len(row) != len(axes) + 1 for row in rows):
            raise ValueError(f"not an operation table: each row needs {len(axes)} sizes and a time")
        captured, disturbed, left_out, libraries = (value.get(name) for name in cls.OPTIONAL)
        return cls(
            axes, rows, bool(captured), bool(disturbed), int(left_out or 0), str(libraries or "")
        )


@dataclasses.dataclass(frozen=True)
class Contention:
    """How much a class of kernels and a collective slow each other down when they overlap.

    kernels     one of KERNEL_CLASSES
    collective  as bench comm names it: all_reduce; copied all_gather if copy engines run it
    kernel_slowdown, collective_slowdown  time with overlap divided by time without; at least 1.0
    ranks       size of the collective's group; 0 if unknown (older files)
    """

    kernels: str
    collective: str
    kernel_slowdown: float
    collective_slowdown: float
    ranks: int = 0

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Reads the fields in order. `ranks` may be missing. Raises ValueError for other rows."""
        try:
            kernels, collective, kernel_slowdown, collective_slowdown, *ranks = row
            (num_ranks,) = ranks or (0,)
            slowdowns = float(kernel_slowdown), float(collective_slowdown)
            return cls(str(kernels), str(collective), *slowdowns, int(num_ranks))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a row of the contention table: {error}") from None


# Kernels with similar contention: matrix products by their time, attention, the optimizer's update, and other
# memory-bound kernels. A short product has few waves of tiles, and loses a whole wave when a collective occupies
# some multiprocessors. Older files also have "long-matmul", which is ignored: there, the slowdown of the
# collective includes its wait for the product.
KERNEL_CLASSES = ("short-matmul", "matmul", "attention", "update", "traffic")
# Beside NCCL's collectives on 2 x H200, products of 74 us took 1.89 times as long, of 180 to 200 us 1.23 to
# 1.88 (docs/log/2026-11-28-pushed-rows.md).
SHORT_PRODUCT_US = 150.0


def kernel_class(operation: str, us: float = SHORT_PRODUCT_US) -> str:
    """Returns the kernel class of an operation that takes `us` microseconds.

    "matmul nt bf16" is a "short-matmul" or "matmul"; "rmsnorm forward fp32" is "traffic".
    """
    first = operation.partition(" ")[0]
    if first == "matmul" and us < SHORT_PRODUCT_US:
        return "short-matmul"
    if first == "optimizer":
        return "update"
    return first if first in KERNEL_CLASSES else "traffic"


# Wrappers whose host time is calibrated, and the number that stands for each phase in their tables.
# Tables of 2026-11-23 and before also have a phase 2, a wait that now counts as backward.
CALIBRATED_WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
WRAPPER_PHASES = {"forward": 0, "backward": 1, "optimizer": 3}


def wrapper_operation(wrapper: str) -> str:
    """Returns the name of the table with the wrapper's host time."""
    return f"host wrapper {wrapper}"


# Checkpointing modes that decide for each operator whether to keep its result, at a cost on the host.
KEEPING = ("selective", "feed-forward")


def launched_under(layout: Layout, checkpointing: str) -> str:
    """Returns the suffix of a host-time table's name, such as " dp2 zero3 keeping selective".

    It is "" for one process without checkpointing, or with checkpointing of whole blocks.
    """
    cut = layout.launched
    suffix = f" {cut}" if cut.ranks > 1 else ""
    return suffix + (f" keeping {checkpointing}" if checkpointing in KEEPING else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSpec:
    """One record of `calibrate`: an operation in one dtype, over all its shapes."""

    kind: ClassVar[str] = "calibration"

    operation: str = option("matmul nt bf16", "Operation and dtype", label=True)
    milliseconds: float = option(4.0, "Milliseconds of work per shape", least=0.0, most=1e4)
    seconds: float = option(
        20.0, "Time limit for all shapes; the remaining ones are skipped", least=0.0, most=1e4
    )
    sizes: str = option("", "Shapes to time instead of the usual grid: '4096x1024 4096x2560'")
    turn: int = option(0, "Repeated measurement: the number of the row it precedes", least=0)
    bucket_mb: float = option(25.0, "Bucket size for the host time of a wrapper, in MB", least=0.0)
    ranks: int = option(
        1, "Ranks that time it at the same time", least=1, most=4096, label="changed"
    )
    device: str = option("cpu", DEVICE_HELP)

    def __post_init__(self) -> None:
        check(self)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shapes in `sizes`; for OPERATORS, each shape is one traced call."""
        if self.operation == OPERATORS:
            return [(call,) for call in json.loads(self.sizes or "[]")]
        return [tuple(map(int, shape.split("x"))) for shape in self.sizes.split()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentionSpec:
    """One record of `calibrate`: a class of kernels and a collective, overlapping."""

    kind: ClassVar[str] = "contention"

    kernels: str = option("matmul", "Class of kernels", choices=KERNEL_CLASSES, label=True)
    collective: str = option(
        "all_reduce",
        "Collective, as bench comm names it; copied all_gather is that of backend copies",
        choices=(*OPS, *(f"{COPIED}{op}" for op in COPIED_OPS)),
        label=True,
    )
    size_bytes: int = option(32 * 2**20, "Message size of the collective", least=1, most=2**40)
    milliseconds: float = option(50.0, "Milliseconds for which both overlap", least=0.0, most=1e4)
    ranks: int = option(2, "Number of processes", least=2, most=4096, label=True)
    device: str = option("cpu", "cpu, or cuda for one GPU per rank")

    def __post_init__(self) -> None:
        check(self)
