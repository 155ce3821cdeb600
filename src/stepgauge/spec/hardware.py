"""What a machine can do: vendor peaks with their source; measured ceilings and links join them in
files.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stepgauge.spec.calibration import (
    ASKED,
    Contention,
    OperationTable,
    kernel_class,
    wrapper_operation,
)
from stepgauge.spec.links import Link
from stepgauge.spec.units import GIB

# Arithmetic a precision's matrix products run in, as the keys of Peaks.
MATMUL_TYPE = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16-pure": "bf16",
    "bf16-master": "bf16",
    "float8": "float8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense peak FLOP/s by arithmetic type (accumulating in fp32), memory bytes/s, and memory, from
    `source`.

    architecture  as compilers name it, where memory is predicted for it: sm90
    memory_gb     as sold
    """

    flops: dict[str, float]
    memory_bytes_per_s: float
    architecture: str
    memory_gb: int
    source: str

    def of(self, precision: str) -> float | None:
        return self.flops.get(MATMUL_TYPE[precision])

    @property
    def program_bytes(self) -> int:
        """Of a device for a process and its CUDA context; 0 where its memory is not known."""
        return self.memory_gb * GIB - NOT_FOR_PROGRAMS if self.memory_gb else 0


def _nvidia(
    fp32: float,
    tf32: float,
    half: float,
    gigabytes: float,
    source: str,
    architecture: str = "",
    sold_gb: int = 0,
) -> Peaks:
    flops = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    return Peaks(
        flops=flops,
        memory_bytes_per_s=gigabytes * 1e9,
        architecture=architecture,
        memory_gb=sold_gb,
        source=source,
    )


# By the name that the driver gives the device. Dense rates, boost clock.
ACCELERATORS: dict[str, Peaks] = {
    "NVIDIA H200": _nvidia(
        67, 494.7, 989.4, 4800, "NVIDIA H200 datasheet, SXM, dense", "sm90", 141
    ),
    "NVIDIA H100 80GB HBM3": _nvidia(
        67, 494.7, 989.4, 3350, "NVIDIA H100 datasheet, SXM, dense", "sm90", 80
    ),
    "NVIDIA H100 PCIe": _nvidia(
        51.2, 378, 756, 2000, "NVIDIA H100 datasheet, PCIe, dense", "sm90", 80
    ),
    "NVIDIA A100-SXM4-80GB": _nvidia(
        19.5, 156, 312, 2039, "NVIDIA A100 datasheet, SXM 80 GB, dense", "sm80", 80
    ),
    "NVIDIA A100-SXM4-40GB": _nvidia(
        19.5, 156, 312, 1555, "NVIDIA A100 datasheet, SXM 40 GB, dense", "sm80", 40
    ),
    "NVIDIA A100 80GB PCIe": _nvidia(
        19.5, 156, 312, 1935, "NVIDIA A100 datasheet, PCIe 80 GB, dense", "sm80", 80
    ),
    "NVIDIA L40S": _nvidia(91.6, 183, 362, 864, "NVIDIA L40S datasheet, dense"),
    "NVIDIA L4": _nvidia(30.3, 60, 121, 300, "NVIDIA L4 datasheet, dense"),
    "NVIDIA GeForce RTX 4090": _nvidia(
        82.6, 82.6, 165.2, 1008, "NVIDIA Ada whitepaper, fp32 accumulation"
    ),
    "NVIDIA GeForce RTX 3090": _nvidia(
        35.6, 35.6, 71, 936, "NVIDIA Ampere GA102 whitepaper, fp32 accumulation"
    ),
}


def peaks(device_name: str) -> Peaks | None:
    """The vendor's peaks of the device, or None where we know none: then no utilisation is stated."""
    return ACCELERATORS.get(device_name)


# Of the gigabytes sold, in GiB: an H200 of 141 has 139.8 for programs, an H100 of 80 has 79.2
# (records' device_bytes), and a process's context is in these, too.
NOT_FOR_TENSORS = 2 * GIB
CUDA_CONTEXT = 500 * 2**20  # of one process (docs/memory.md)
NOT_FOR_PROGRAMS = NOT_FOR_TENSORS - CUDA_CONTEXT


def fits(needed: float, architecture: str) -> str:
    """The smallest device of the architecture that holds so many bytes, in words; or ""."""
    known = [
        (its.memory_gb, name)
        for name, its in ACCELERATORS.items()
        if its.architecture == architecture
    ]
    if not known:
        return ""
    holding = [device for device in known if needed + NOT_FOR_TENSORS <= device[0] * GIB]
    memory, name = min(holding, default=max(known))
    name = name.removeprefix("NVIDIA ")
    return name if holding else f"no: {name} has {memory} GB"


HARDWARE_SCHEMA = 1
SHIPPED = Path(__file__).parent / "machines"  # files of the package


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """A calibrated machine on disk.

    device         name of its accelerator, as the driver gives it
    threads        of a CPU: how many the operations ran on; 0 of a GPU
    links          what collectives cost: bench comm
    operations     what single operations cost: calibrate
    by_ranks       the same of each rank while so many of them share one device, a CPU's cores
    contention     what kernels and collectives cost each other
    base           a calibrated machine whose operations hold here, by the ratio of published peaks
    other          what else stands in it, such as a fabric (spec/fabric.py); it stays as it is
    """

    name: str
    device: str = ""
    threads: int = 0
    links: Sequence[Link] = ()
    operations: Mapping[str, OperationTable] = dataclasses.field(default_factory=dict)
    by_ranks: Mapping[int, Mapping[str, OperationTable]] = dataclasses.field(default_factory=dict)
    contention: Sequence[Contention] = ()
    base: "HardwareFile | None" = None
    other: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file, with the one beside it, else of the package, that its `base` names. Raises
        ValueError if either is no hardware file.
        """
        return cls._read(path, ())

    @classmethod
    def _read(cls, path: Path, above: tuple[Path, ...]) -> Self:
        """The file, which `above` name as their base."""
        if path.resolve() in above:
            raise ValueError(f"{path} is its own base")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"no hardware file at {path}") from None
        except OSError as error:
            raise ValueError(f"cannot read the hardware file {path}: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{path} is no hardware file: it is not JSON") from None
        if not isinstance(value, dict) or value.pop("schema", None) != HARDWARE_SCHEMA:
            raise ValueError(f"{path} is no hardware file of schema {HARDWARE_SCHEMA}")
        base = None
        if name := value.get("base"):
            beside = path.parent / str(name)
            known = beside if beside.exists() else SHIPPED / str(name)
            base = cls._read(known if known.exists() else beside, (*above, path.resolve()))
        try:
            return cls._of_file(value, base, name=path.stem)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the hardware file {path} is damaged: {error}") from None

    @classmethod
    def _of_file(cls, value: dict[str, Any], base: Self | None, *, name: str) -> Self:
        """Raises one of several errors for what is no hardware file."""
        value.pop("disturbed", None)  # a sentence that follows from the operations
        if not isinstance(device := value.pop("device", ""), str):
            raise ValueError(f"device is {device!r}; it is a name")
        return cls(
            name=value.pop("name", name),
            device=device,
            threads=value.pop("threads", 0),
            links=[Link.from_dict(link) for link in value.pop("links", [])],
            operations=_tables(value.pop("operations", {})),
            by_ranks={
                int(ranks): _tables(tables)
                for ranks, tables in value.pop("operations_by_ranks", {}).items()
            },
            contention=[Contention.from_row(row) for row in value.pop("contention", [])],
            base=base,
            other=value,
        )

    @property
    def peaks(self) -> Peaks | None:
        """Those that the file gives, else those that are known of its device. Raises ValueError for
        what are no peaks.
        """
        given = self.other.get("peaks")
        if not given:
            return peaks(self.device)
        try:
            found = Peaks(**given)
            if not all(rate > 0 for rate in (*found.flops.values(), found.memory_bytes_per_s)):
                raise ValueError("a rate is not above 0")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the hardware file {self.name} has no such peaks: {error}") from None
        return found

    @property
    def device_kind(self) -> str:
        """What steps are predicted for where nobody says: cpu or cuda."""
        return "cpu" if self.threads else "cuda"

    def require_kind(self, device: str) -> None:
        """Of a GPU's file no time of a CPU is taken, nor the other way round. Raises ValueError."""
        if device.startswith("cpu") and self.peaks is not None:
            raise ValueError(
                f"device is {device!r}; the hardware file {self.name} is of a GPU: choose cuda"
            )
        if device.startswith("cuda") and self.threads:
            raise ValueError(
                f"device is {device!r}; the hardware file {self.name} is of a CPU: choose cpu"
            )

    @property
    def disturbance(self) -> str:
        """What to know of a calibration beside other work, as a sentence; or ""."""
        alone = [name for name, table in self.operations.items() if table.disturbed]
        shared = [
            f"{name} on {ranks} ranks"
            for ranks, tables in self.by_ranks.items()
            for name, table in tables.items()
            if table.disturbed
        ]
        found = [*alone, *shared]
        if not found:
            return ""
        others = f" and {len(found) - 1} more" if found[1:] else ""
        return (
            f"the hardware file {self.name} was calibrated beside other work ({found[0]}{others}): "
            f"calibrate it with --fresh on a quiet machine"
        )

    def on_ranks(self, ranks: int) -> Self:
        """The machine as each of so many ranks finds it: where ranks share a CPU, with the
        operations that were timed side by side alone. What GPUs were asked for side by side is the
        slowest one's.
        """
        shared = self.by_ranks.get(ranks, {})
        asked = {name: table for name, table in shared.items() if name.endswith(f" {ASKED}")}
        known = shared if len(shared) > len(asked) else self.operations
        operations = {**known, **asked}
        return dataclasses.replace(self, operations=operations, by_ranks={})

    def contention_of(
        self, operation: str, collective: str, ranks: int, us: float = math.inf
    ) -> Contention | None:
        """What an operation that takes so long and the collective cost each other, measured between
        as many ranks as come nearest to these; None where it was not. Older files do not tell short
        products from others.
        """
        beside = [row for row in self.contention if row.collective == collective]
        rows: list[Contention] = []
        for kernels in (kernel_class(operation, us), kernel_class(operation)):
            rows = rows or [row for row in beside if row.kernels == kernels]
        return min(rows, key=lambda row: abs(row.ranks - ranks), default=None)

    def with_contention(self, rows: Sequence[Contention]) -> Self:
        """The rows in place of those of the same kernels, collective and ranks; the others stay."""
        every = (*self.contention, *rows)
        kept = {(row.kernels, row.collective, row.ranks): row for row in every}
        return dataclasses.replace(self, contention=list(kept.values()))

    def with_links(self, links: Sequence[Link]) -> Self:
        """The links in place of those of the same operation; the others stay."""
        kept = {json.dumps(link.asked, sort_keys=True): link for link in (*self.links, *links)}
        return dataclasses.replace(self, links=list(kept.values()))

    def link(self, **asked: Any) -> Link | None:
        """The first link with these fields: link(op="all_reduce", backend="nccl", ranks=4)."""
        return next(
            (k for k in self.links if all(k.asked.get(n) == value for n, value in asked.items())),
            None,
        )

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises OSError where it cannot."""
        draft = draft_of(path)
        value = {
            "schema": HARDWARE_SCHEMA,
            "name": self.name,
            "device": self.device,
            "threads": self.threads,
            **self.other,
            **({"disturbed": self.disturbance} if self.disturbance else {}),
            "operations": _as_dict(self.operations),
            "operations_by_ranks": {str(n): _as_dict(own) for n, own in self.by_ranks.items()},
            "contention": [dataclasses.astuple(row) for row in self.contention],
            "links": [dataclasses.asdict(link) for link in self.links],
        }
        draft.write_text(json.dumps(value) + "\n")
        draft.replace(path)


def draft_of(path: Path) -> Path:
    """An empty file beside the path, which takes its place when it is written. Raises OSError where
    none can be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch()
    return draft


def _tables(value: Mapping[str, Any]) -> dict[str, OperationTable]:
    """Raises ValueError for a time that cannot be; what a wrapper adds to the host's may be negative."""
    tables = {name: OperationTable.from_dict(table) for name, table in value.items()}
    for name, table in tables.items():
        bad = [row for row in table.rows if not 0 < row[-1] < math.inf]
        if bad and not name.startswith(wrapper_operation("")):
            raise ValueError(f"{name} takes {bad[0][-1]} µs at {bad[0][:-1]}")
    return tables


def _as_dict(tables: Mapping[str, OperationTable]) -> dict[str, Any]:
    return {name: table.to_dict() for name, table in tables.items()}
