"""A data parallel training step as it is asked for: network, wrapper, ranks and how it is timed."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import as_in, check, option
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

if TYPE_CHECKING:
    from stepgauge.spec.train import TrainSpec

# Each wrapper, and how often a step sends a share (N−1)/N of all gradients and of all weights (ring
# algorithms).
WRAPPERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "none": (0, 0),
        "naive": (2, 0),
        "flat": (2, 0),
        "overlapped": (2, 0),
        "bucketed": (2, 0),
        "zero1": (2, 1),
        "zero2": (1, 1),
        "zero3": (1, 2),
        "torch-ddp": (2, 0),
        "torch-ddp-views": (2, 0),
        "torch-zero1": (2, 1),
        "torch-fsdp": (1, 2),
    }
)
FULLY_SHARDED = ("zero3", "torch-fsdp")
# What each rank has of the gradients after their synchronisation is its share only.
SHARDED_GRADIENTS = ("zero2", *FULLY_SHARDED)
BUCKETED = ("bucketed", "zero1", "zero2", "torch-ddp", "torch-ddp-views", "torch-zero1")
# Wrappers whose gradients may travel by either transport.
TRANSPORTED = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2")
TRANSPORTS = ("collectives", "peer-copies")
# Wrappers whose gradients may travel in another type than their own. The fully sharded ones send
# what they compute in.
NARROWED = (*TRANSPORTED, "torch-ddp", "torch-ddp-views", "torch-zero1")
REDUCE_DTYPES = ("own", "bf16", "fp16")
BACKENDS: Mapping[str, str] = MappingProxyType({"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelSpec:
    """What `bench data-parallel` runs for one row. The sequence length is the model's
    context_length.
    """

    kind: ClassVar[str] = "data-parallel"

    model: ModelSpec | BertSpec
    size: str = option("custom", "preset that the model spec starts from", word="{size}")
    wrapper: str = option(
        "bucketed",
        "how training is spread; none: each rank trains alone",
        choices=WRAPPERS,
        word="{wrapper}",
    )
    bucket_mb: float = option(
        25.0,
        "MB (10^6 bytes) of gradients at which a bucket is sent; 0: a bucket a gradient",
        least=0.0,
        most=1e6,
        word="buckets of {bucket_mb:g} MB",
        quiet=25.0,
        special={0.0: "a bucket a gradient"},
    )
    ranks: int = option(
        2, "processes, each with a device of its own", least=1, most=100_000, word="{ranks} ranks"
    )
    backend: str = option(
        "auto",
        "auto is nccl on GPUs, gloo on CPUs",
        choices=("auto", *BACKENDS),
        word="{backend}",
        quiet="auto",
    )
    transport: str = option(
        "collectives",
        "of gradients: the backend's, or copies into the memory of the other ranks of this machine",
        choices=TRANSPORTS,
        word="{transport}",
        quiet="collectives",
    )
    reduce_dtype: str = option(
        "own",
        "type that gradients are averaged in, by wrappers that leave weights whole; own: the parameters'",
        choices=REDUCE_DTYPES,
        word="gradients in {reduce_dtype}",
        quiet="own",
    )
    max_ctas: int = option(
        0,
        "most thread blocks of NCCL, at high priority; 0: as NCCL does",
        least=0,
        most=64,
        word="{max_ctas} thread blocks",
        quiet=0,
    )
    batch: int = option(
        4, "sequences a rank", least=1, most=1_000_000, word="batch {batch} × {context_length}"
    )
    precision: str = as_in(
        WorkSpec, "precision", "as in bench step; fully sharded wrappers also send it"
    )
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing")
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    warmup: int = option(5, "untimed steps first", least=1, most=100_000)
    steps: int = option(10, "timed steps", least=1, most=1_000_000)
    trace: bool = option(
        False, "profile two more steps, for the overlap of communication and computing", bare=True
    )
    device: str = option("cpu", "cpu or cuda: each rank takes the GPU of its own number")
    seed: int = option(
        0, "of weights and tokens", least=0, most=2**63 - 1, word="seed {seed}", quiet=0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.backend == "nccl" and not self.device.startswith("cuda"):
            raise ValueError(
                f"backend is 'nccl', which moves GPU tensors only; device is {self.device!r}"
            )
        check_wrapper(self.wrapper, self)
        if isinstance(self.model, BertSpec) and self.model.dropout and self.checkpointing != "none":
            raise ValueError(
                f"dropout is {self.model.dropout}; what checkpointing computes again would drop other values: choose 0"
            )

    def without_idle_options(self) -> Self:
        """With defaults for the options that the wrapper does not look at: rows that differ in
        these alone are one.
        """
        idle = [] if self.wrapper in BUCKETED else ["bucket_mb"]
        idle += [] if "nccl" in self.group_backend and self.wrapper != "none" else ["max_ctas"]
        idle += [] if self.wrapper in TRANSPORTED else ["transport"]
        idle += [] if self.wrapper in NARROWED else ["reduce_dtype"]
        defaults: dict[str, Any] = {
            f.name: f.default for f in dataclasses.fields(self) if f.name in idle
        }
        return dataclasses.replace(self, **defaults)

    @property
    def group_backend(self) -> str:
        """As torch.distributed names it."""
        return (
            BACKENDS["nccl" if self.device.startswith("cuda") else "gloo"]
            if self.backend == "auto"
            else (BACKENDS[self.backend])
        )


def check_wrapper(wrapper: str, spec: "DataParallelSpec | TrainSpec") -> None:
    """Raises ValueError for what a wrapper cannot do."""
    compresses = wrapper in NARROWED and wrapper not in TRANSPORTED and spec.reduce_dtype != "own"
    if compresses and not spec.device.startswith("cuda"):
        raise ValueError(
            f"reduce_dtype is {spec.reduce_dtype!r}; {wrapper} compresses on GPUs only, device is {spec.device!r}"
        )
    if wrapper == "zero3" and spec.compile != "off":
        raise ValueError(
            f"compile is {spec.compile!r}; zero3 gathers weights in Python as they are read and takes 'off'"
        )
    if wrapper in SHARDED_GRADIENTS and spec.precision == "fp16":
        raise ValueError(
            f"precision is 'fp16', whose loss scale needs every rank's whole gradients; {wrapper} has shares of them: "
            f"choose bf16"
        )


def sent_bytes(wrapper: str, *, gradient_bytes: int, weight_bytes: int, ranks: int) -> float:
    """Bytes that a rank sends in a step, by the counts of ring algorithms, as a mean over ranks."""
    of_gradients, of_weights = WRAPPERS[wrapper]
    return (ranks - 1) / ranks * (of_gradients * gradient_bytes + of_weights * weight_bytes)
