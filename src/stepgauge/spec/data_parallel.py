"""A data parallel training step as it is asked for: network, wrapper, ranks and how it is timed."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import as_in, check, option, with_defaults
from stepgauge.spec.layout import WRAPPERS, Layout, check_wrapper
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import CHECKPOINTING, WorkSpec
from stepgauge.spec.user_model import UserModel, settle_user_model

REDUCE_DTYPES = ("own", "bf16", "fp16")
BACKENDS: Mapping[str, str] = MappingProxyType({"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"})


class OnBackend:
    """What a spec with the fields `backend` and `device` says of its process group."""

    backend: str
    device: str

    def check_backend(self) -> None:
        """Raises ValueError for NCCL on CPUs."""
        if self.backend == "nccl" and not self.device.startswith(("cuda", "auto")):
            raise ValueError(
                f"backend is 'nccl', which moves GPU tensors only; device is {self.device!r}"
            )

    @property
    def group_backend(self) -> str:
        """As torch.distributed names it."""
        if self.backend != "auto":
            return BACKENDS[self.backend]
        return BACKENDS["nccl" if self.device.startswith("cuda") else "gloo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelSpec(OnBackend):
    """One row of `bench data-parallel`. The sequence length is the model's context_length."""

    kind: ClassVar[str] = "data-parallel"

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "preset that the model spec starts from", label=True)
    wrapper: str = option(
        "bucketed",
        "how training is spread; none: each rank trains alone",
        choices=WRAPPERS,
        label=True,
    )
    bucket_mb: float = option(
        25.0,
        "MB (10^6 bytes) of gradients at which a bucket is sent; 0: a bucket a gradient",
        least=0.0,
        most=1e6,
        label="changed",
    )
    ranks: int = option(
        2, "processes, each with a device of its own", least=1, most=100_000, label=True
    )
    backend: str = option(
        "auto", "auto is nccl on GPUs, gloo on CPUs", choices=("auto", *BACKENDS), label="changed"
    )
    reduce_dtype: str = option(
        "own",
        "type that gradients are averaged in, by wrappers that leave weights whole; own: the "
        "parameters'",
        choices=REDUCE_DTYPES,
        label="changed",
    )
    batch: int = option(
        4, "sequences a rank", least=1, most=1_000_000, label=True, named_with="context_length"
    )
    precision: str = as_in(
        WorkSpec, "precision", "as in bench step; fully sharded wrappers also send it"
    )
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing", choices=CHECKPOINTING)
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    cuda_graphs: bool = option(
        False,
        "record forward, backward and the averaging once as one CUDA graph, and replay it: for "
        "steps that the host is too slow for",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(5, "untimed steps first", least=1, most=100_000)
    steps: int = option(10, "timed steps", least=1, most=1_000_000)
    trace: bool = option(
        False,
        "profile two more steps, for the overlap of communication and computing",
        flag_value=True,
    )
    device: str = option("cpu", "cpu or cuda: each rank takes the GPU of its own number")
    seed: int = option(0, "of weights and tokens", least=0, most=2**63 - 1, label="changed")

    phases: ClassVar[str] = "step"
    accumulation: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.model, UserModel):
            settle_user_model(self)
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
                f"dropout is {self.model.dropout}; checkpointing would drop other values as it "
                "computes again; choose 0"
            )

    def _check_graphs(self) -> None:
        """Raises ValueError for what cannot be recorded."""
        reasons = {
            f"wrapper is {self.wrapper!r}, whose averaging asks what has arrived": not WRAPPERS[
                self.wrapper
            ].recorded,
            f"device is {self.device!r}, which has none": self.device.startswith("cpu"),
            "backend is 'gloo', which runs on the host": self.group_backend == "gloo",
            f"compile is {self.compile!r}, which records itself": self.compile == "reduce-overhead",
            f"precision is {self.precision!r}, whose loss scale the host reads": self.precision
            == "fp16",
            f"reduce_dtype is {self.reduce_dtype!r}, whose copies wait": self.reduce_dtype != "own",
            "a user's model gives its loss by a function of its own": isinstance(
                self.model, UserModel
            ),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(f"cuda_graphs is True; {reason}")

    def canonical(self) -> Self:
        """With defaults for the options that the wrapper has no use for: rows that differ in these
        alone are one.
        """
        wrapper = WRAPPERS[self.wrapper]
        used = {"bucket_mb": wrapper.buckets, "reduce_dtype": wrapper.reduce_dtype}
        return with_defaults(self, used)

    @property
    def micro_batch(self) -> int:
        return self.batch

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        assert not isinstance(self.model, UserModel)
        return self.ranks * self.batch * self.model.context_length

    @property
    def parsed_layout(self) -> Layout:
        """Without a wrapper each rank is alone."""
        if self.wrapper == "none":
            return Layout()
        return Layout(data=self.ranks, wrapper=self.wrapper)
