"""The spec of a data parallel training step: network, wrapper, ranks and timing."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import RANKS_DEVICE_HELP, as_in, check, option, with_defaults
from stepgauge.spec.layout import WRAPPERS, Layout, check_wrapper
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import CHECKPOINTING, CHECKPOINTING_HELP, WorkSpec, check_kernels
from stepgauge.spec.user_model import OfNetwork, UserModel, settle_user_model

REDUCE_DTYPES = ("own", "bf16", "fp16")
BACKENDS: Mapping[str, str] = MappingProxyType({"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"})


class OnBackend:
    """The process group of a spec with the fields `backend` and `device`."""

    backend: str
    device: str

    def check_backend(self) -> None:
        """Raises ValueError for NCCL on a CPU."""
        if self.backend == "nccl" and not self.device.startswith(("cuda", "auto")):
            raise ValueError(
                f"backend is 'nccl', which takes only GPU tensors; device is {self.device!r}"
            )

    @property
    def group_backend(self) -> str:
        """The backend as torch.distributed names it."""
        if self.backend != "auto":
            return BACKENDS[self.backend]
        return BACKENDS["nccl" if self.device.startswith("cuda") else "gloo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelSpec(OfNetwork, OnBackend):
    """One row of `bench data-parallel`. The sequence length is the model's context_length."""

    kind: ClassVar[str] = "data-parallel"

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "Preset network", label=True)
    wrapper: str = option(
        "bucketed",
        "Data parallel wrapper; none: ranks do not communicate",
        choices=WRAPPERS,
        label=True,
    )
    bucket_mb: float = option(
        25.0,
        "Bucket size in MB (10^6 bytes); 0: one gradient per bucket",
        least=0.0,
        most=1e6,
        label="changed",
    )
    ranks: int = option(
        2, "Number of processes, each on its own device", least=1, most=100_000, label=True
    )
    backend: str = option(
        "auto",
        "Communication library; auto: nccl on GPUs, gloo on CPUs",
        choices=("auto", *BACKENDS),
        label="changed",
    )
    reduce_dtype: str = option(
        "own",
        "dtype of the gradient all-reduce, for wrappers with unsharded weights; own: the "
        "parameters' dtype",
        choices=REDUCE_DTYPES,
        label="changed",
    )
    batch: int = option(
        4, "Sequences per rank", least=1, most=1_000_000, label=True, named_with="context_length"
    )
    precision: str = as_in(
        WorkSpec,
        "precision",
        "As in bench step; wrappers that shard weights also communicate in it",
    )
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing", CHECKPOINTING_HELP, choices=CHECKPOINTING)
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    cuda_graphs: bool = option(
        False,
        "Capture forward, backward and the gradient all-reduce in one CUDA graph and replay it, to "
        "save launch overhead",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(5, "Warm-up steps, not timed", least=1, most=100_000)
    steps: int = option(10, "Timed steps", least=1, most=1_000_000)
    trace: bool = option(
        False,
        "Profile two more steps to measure how much communication is hidden",
        flag_value=True,
    )
    device: str = option("cpu", RANKS_DEVICE_HELP)
    seed: int = option(0, "Seed of weights and tokens", least=0, most=2**63 - 1, label="changed")

    phases: ClassVar[str] = "step"
    accumulation: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        settle_user_model(self)
        check_kernels(self)
        self.check_backend()
        check_wrapper(
            self.wrapper,
            device=self.device,
            compile=self.compile,
            precision=self.precision,
            reduce_dtype=self.reduce_dtype,
            checkpointing=self.checkpointing,
        )
        if self.cuda_graphs:
            self._check_graphs()
        if isinstance(self.model, BertSpec) and self.model.dropout and self.checkpointing != "none":
            raise ValueError(
                f"dropout is {self.model.dropout}; with checkpointing, the recomputation would drop "
                "other values: choose 0"
            )

    def _check_graphs(self) -> None:
        """Raises ValueError for a step that cannot be captured in a CUDA graph."""
        wrapper = WRAPPERS[self.wrapper]
        obstacles = (
            (not wrapper.recorded, f"wrapper is {self.wrapper!r}, which cannot be captured"),
            (self.device.startswith("cpu"), f"device is {self.device!r}, which has no CUDA graphs"),
            (self.backend == "gloo", "backend is 'gloo', which communicates on the host"),
            (
                self.compile == "reduce-overhead",
                f"compile is {self.compile!r}, which captures CUDA graphs itself",
            ),
            (
                self.precision == "fp16",
                f"precision is {self.precision!r}, whose loss scaling reads values on the host",
            ),
            (
                self.reduce_dtype != "own",
                f"reduce_dtype is {self.reduce_dtype!r}, which cannot be captured",
            ),
            (isinstance(self.model, UserModel), "a user's model cannot be captured"),
        )
        for holds, obstacle in obstacles:
            if holds:
                raise ValueError(f"cuda_graphs is True; {obstacle}")

    def canonical(self) -> Self:
        """Resets options that the wrapper ignores, so that specs which differ only in them are equal."""
        wrapper = WRAPPERS[self.wrapper]
        used = {"bucket_mb": wrapper.buckets, "reduce_dtype": wrapper.reduce_dtype}
        return with_defaults(self, used)

    @property
    def micro_batch(self) -> int:
        return self.batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.ranks * self.batch * self.network.context_length

    @property
    def parsed_layout(self) -> Layout:
        """The layout. Without a wrapper ranks do not communicate: each is a layout of one."""
        if self.wrapper == "none":
            return Layout()
        return Layout(data=self.ranks, wrapper=self.wrapper)
