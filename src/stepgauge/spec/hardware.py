"""Hardware: vendor peaks with their source, and the calibrated measurements of a machine as a file."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stepgauge.spec.calibration import (
    EXACT,
    SHORT_PRODUCT_US,
    Contention,
    OperationTable,
    kernel_class,
    wrapper_operation,
)
from stepgauge.spec.fields import check, check_type
from stepgauge.spec.first_names import first_names
from stepgauge.spec.host_tables import host_tables, is_host_operation
from stepgauge.spec.json_objects import read_object, require_keys
from stepgauge.spec.links import Link
from stepgauge.spec.units import GIB
from stepgauge.spec.whole_file import draft_of, write_whole

# Arithmetic type of the matrix products in each precision; the keys of Peaks.flops.
MATMUL_TYPE = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16-pure": "bf16",
    "bf16-master": "bf16",
    "float8": "float8",
}


LEAST_RATE = 1e9  # of an accelerator; a lower one is in TFLOP/s or GB/s by mistake


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of an accelerator, from `source`. Raises ValueError for impossible values.

    flops         dense FLOP/s by arithmetic type, with fp32 accumulation
    architecture  compiler name such as sm90, if steps can be traced for it; else ""
    memory_gb     memory as sold; 0 if unknown
    """

    flops: dict[str, float]
    memory_bytes_per_s: float
    architecture: str = ""
    memory_gb: float
    source: str

    def __post_init__(self) -> None:
        check(self)
        require_keys(self.flops, "flops", (), known=list(dict.fromkeys(MATMUL_TYPE.values())))
        rates = {f"flops.{name}": rate for name, rate in self.flops.items()}
        for name, rate in {**rates, "memory_bytes_per_s": self.memory_bytes_per_s}.items():
            check_type(name, float, rate)
            if not LEAST_RATE <= rate < math.inf:
                raise ValueError(
                    f"{name} is {rate}; it must be at least {LEAST_RATE:g}, in units of one FLOP or "
                    f"byte per second: 2.25e15 for 2250 TFLOP/s"
                )

    def of(self, precision: str) -> float | None:
        """Returns the peak FLOP/s of matrix products in this precision, or None if unknown."""
        return self.flops.get(MATMUL_TYPE[precision])

    @property
    def program_bytes(self) -> int:
        """Memory for one process including its CUDA context; 0 if unknown."""
        return int(self.memory_gb * GIB) - NOT_FOR_PROGRAMS if self.memory_gb else 0


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


# By the device name of the driver. Dense rates at boost clock.
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
    """Returns the vendor's peaks, or None for an unknown device, for which no MFU is reported."""
    return ACCELERATORS.get(device_name)


# Memory as sold, read as GiB, minus what tensors can use: an H200 (141 GB) has 139.8 GiB for programs,
# an H100 (80 GB) 79.2 GiB (device_bytes in records), and this includes the process's CUDA context.
NOT_FOR_TENSORS = 2 * GIB
CUDA_CONTEXT = 500 * 2**20  # per process (docs/memory.md)
NOT_FOR_PROGRAMS = NOT_FOR_TENSORS - CUDA_CONTEXT


def fits(needed: float, architecture: str) -> str:
    """Returns the smallest device of the architecture that holds so many bytes.

    If none does, returns a text such as "no: the largest, H200, has 141 GB"; if none is known, "".
    """
    devices = [
        (peaks.memory_gb, name)
        for name, peaks in ACCELERATORS.items()
        if peaks.architecture == architecture
    ]
    if not devices:
        return ""
    fitting = [device for device in devices if needed + NOT_FOR_TENSORS <= device[0] * GIB]
    memory, name = min(fitting, default=max(devices))
    name = name.removeprefix("NVIDIA ")
    return name if fitting else f"no: the largest, {name}, has {memory} GB"


HARDWARE_SCHEMA = 1
SHIPPED = Path(__file__).parent / "machines"  # hardware files that come with the package


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """A calibrated machine.

    device         device name of the driver
    threads        number of threads of a CPU; 0 for a GPU
    links          times of collectives, from bench comm
    operations     times of single operations, from calibrate
    by_ranks       number of ranks -> operation times per rank while that many ranks share the CPU; on GPUs
                   those of the host
    contention     slowdowns of kernels and collectives that overlap
    base           another machine, whose times of operations that this one lacks are scaled by the ratio
                   of peaks
    other          remaining fields of the file, such as a fabric (spec/fabric.py); written unchanged
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
        """Reads the file and its `base`, which is in the same folder or comes with the package.

        Raises ValueError if either is not a hardware file.
        """
        return cls._read(path, ())

    @classmethod
    def _read(cls, path: Path, derived: tuple[Path, ...]) -> Self:
        """Reads the file. `derived` are the files for which it is the base, directly or not."""
        if path.resolve() in derived:
            raise ValueError(f"{path} is its own base")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"no hardware file at {path}") from None
        except OSError as error:
            raise ValueError(f"cannot read the hardware file {path}: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{path} is not a hardware file: it is not JSON") from None
        if not isinstance(value, dict) or value.pop("schema", None) != HARDWARE_SCHEMA:
            raise ValueError(f"{path} is not a hardware file of schema {HARDWARE_SCHEMA}")
        base = None
        if name := value.get("base"):
            candidates = path.parent.resolve() / str(name), SHIPPED / str(name)
            base_path = next(filter(Path.exists, candidates), candidates[0])
            base = cls._read(base_path, (*derived, path.resolve()))
            # A copy of the file in another folder finds it by its whole path, or in the package.
            is_shipped = base_path.resolve().parent == SHIPPED.resolve()
            value["base"] = base_path.resolve().name if is_shipped else str(base_path)
        try:
            return cls._from_json(value, base, name=path.stem)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the hardware file {path} is damaged: {error}") from None

    @classmethod
    def _from_json(cls, value: dict[str, Any], base: Self | None, *, name: str) -> Self:
        """Raises AttributeError, KeyError, TypeError or ValueError for an invalid file."""
        value.pop("disturbed", None)  # written for readers; follows from the operations
        if not isinstance(device := value.pop("device", ""), str):
            raise ValueError(f"device is {device!r}; it must be a name")
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
        """The peaks in the file, else the known peaks of its device.

        Raises ValueError if those in the file are invalid.
        """
        fields = self.other.get("peaks")
        if not fields:
            return peaks(self.device)
        try:
            return read_object(Peaks, fields, "peaks")
        except ValueError as error:
            raise ValueError(f"the hardware file {self.name}: {error}") from None

    @property
    def device_kind(self) -> str:
        """The default device of predictions from this file: cpu or cuda."""
        return "cpu" if self.threads else "cuda"

    def require_kind(self, device: str) -> None:
        """Raises ValueError if another kind of device is to be predicted than that of the file."""
        if device.startswith(("cpu", "mps")) and self.peaks is not None:
            raise ValueError(
                f"device is {device!r}; the hardware file {self.name} is that of an NVIDIA GPU: choose cuda"
            )
        if device.startswith(("cuda", "mps")) and self.threads:
            raise ValueError(
                f"device is {device!r}; the hardware file {self.name} is that of a CPU: choose cpu"
            )

    @property
    def disturbance(self) -> str:
        """A warning if other work ran during the calibration; else ""."""
        disturbed = [name for name, table in self._named_tables().items() if table.disturbed]
        if not disturbed:
            return ""
        return (
            f"the hardware file {self.name} was calibrated beside other work "
            f"({first_names(disturbed, 1)}): calibrate it with --fresh on a quiet machine"
        )

    def _named_tables(self) -> dict[str, OperationTable]:
        """Returns all tables, with the number of ranks in the names of those of several."""
        of_ranks = {
            f"{name} on {ranks} ranks": table
            for ranks, tables in self.by_ranks.items()
            for name, table in tables.items()
        }
        return {**self.operations, **of_ranks}

    def on_ranks(self, ranks: int) -> Self:
        """Returns the machine with the operation times of one of so many ranks.

        On a CPU, whose cores the ranks share, these are the times measured on all ranks at once. On GPUs
        they are those of one GPU and, for the host, those measured on the nearest number of ranks.
        Tables timed for certain steps are added if they were timed on just so many.
        """
        shared = self.by_ranks.get(ranks, {})
        requested = {name: table for name, table in shared.items() if name.endswith(f" {EXACT}")}
        hosts = host_tables(self.by_ranks, ranks)
        is_shared_cpu = any(n not in requested and not is_host_operation(n) for n in shared)
        base = shared if is_shared_cpu else self.operations
        return dataclasses.replace(
            self,
            operations={**base, **hosts, **requested},
            by_ranks={},
            base=self.base and self.base.on_ranks(ranks),
        )

    def contention_of(
        self, operation: str, collective: str, ranks: int, us: float = SHORT_PRODUCT_US
    ) -> Contention | None:
        """Returns how an operation of `us` microseconds and the collective slow each other down.

        The result was measured on the number of ranks closest to `ranks`; None if not measured.
        A file may not distinguish matrix products by their time. They all count as "matmul" then. On a CPU,
        the optimizer's update counts as "traffic".
        """
        candidates = [row for row in self.contention if row.collective == collective]
        rows: list[Contention] = []
        classes = [kernel_class(operation, us), kernel_class(operation)]
        if self.device_kind == "cpu":
            classes.append("traffic")
        for kernels in classes:
            rows = rows or [row for row in candidates if row.kernels == kernels]
        return min(rows, key=lambda row: abs(row.ranks - ranks), default=None)

    def with_contention(self, rows: Sequence[Contention]) -> Self:
        """Returns the file with these rows, which replace those of the same kernels, collective and ranks."""
        merged = (*self.contention, *rows)
        kept = {(row.kernels, row.collective, row.ranks): row for row in merged}
        return dataclasses.replace(self, contention=list(kept.values()))

    def with_links(self, links: Sequence[Link]) -> Self:
        """Returns the file with these links, which replace those of the same operation."""
        kept = {json.dumps(link.settings, sort_keys=True): link for link in (*self.links, *links)}
        return dataclasses.replace(self, links=list(kept.values()))

    def link(self, **settings: Any) -> Link | None:
        """Returns the first link with these fields: link(op="all_reduce", backend="nccl", ranks=4)."""
        return next(
            (link for link in self.links if settings.items() <= link.settings.items()), None
        )

    def write(self, path: Path) -> None:
        """Writes the file atomically; of a symbolic link, the file that it points to. Raises OSError if
        that fails.
        """
        folder = path.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        base = Path(self.other.get("base") or "")
        near = {"base": str(base.relative_to(folder))} if base.is_relative_to(folder) else {}
        value = {
            "schema": HARDWARE_SCHEMA,
            "name": self.name,
            "device": self.device,
            "threads": self.threads,
            **self.other,
            **near,
            **({"disturbed": self.disturbance} if self.disturbance else {}),
            "operations": _as_dict(self.operations),
            "operations_by_ranks": {str(n): _as_dict(own) for n, own in self.by_ranks.items()},
            "contention": [dataclasses.astuple(row) for row in self.contention],
            "links": [dataclasses.asdict(link) for link in self.links],
        }
        write_whole(path, json.dumps(value) + "\n")


def require_writable(path: Path) -> None:
    """Creates the folder of the file. Raises OSError if the file could not be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    draft.touch()
    draft.unlink()


def _tables(value: Mapping[str, Any]) -> dict[str, OperationTable]:
    """Raises ValueError for an impossible time. (The host time that a wrapper adds may be negative.)"""
    tables = {_renamed(name): OperationTable.from_dict(table) for name, table in value.items()}
    for name, table in tables.items():
        invalid = [row for row in table.rows if not 0 < row[-1] < math.inf]
        if invalid and not name.startswith(wrapper_operation("")):
            raise ValueError(f"{name} takes {invalid[0][-1]} µs at {invalid[0][:-1]}")
    return tables


def _renamed(name: str) -> str:
    """Returns a table's name; older files called the suffix of exact shapes "asked"."""
    operation = name.removesuffix(" asked")
    return name if operation == name else f"{operation} {EXACT}"


def _as_dict(tables: Mapping[str, OperationTable]) -> dict[str, Any]:
    return {name: table.to_dict() for name, table in tables.items()}
