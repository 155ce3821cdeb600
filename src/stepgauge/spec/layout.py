"""The parallel layout of a network, and the table of data parallel wrappers.

A layout has up to four axes. Along `data`, ranks replicate or shard the network and train on
different batches; `context` splits each sequence, `tensor` each layer, and `pipeline` assigns runs
of layers to ranks. The text of a layout names everything that is not the default, for example
"dp2 zero3 tp2 overlap", "cp2" or "pp4 zbv m8"; one process is "none".
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from stepgauge.spec.plan.buckets import FIRST_BUCKET_MB, Bucket, Parameter, plan_buckets
from stepgauge.spec.plan.pipeline.schedules import DEFAULT_PER_RANK, LOOPED, SCHEDULES

SEPARATORS = "(a comma separates layouts, a space the words of one)"
SHARDED_PARTS = ("optimizer state", "gradients", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """The properties of a data parallel wrapper.

    gradient_sends  how many times (N−1)/N of all gradient bytes a rank sends per step (ring)
    weight_sends    the same for the weights
    stage           ZeRO stage: the first `stage` of SHARDED_PARTS are sharded
    buckets         has buckets of `bucket_mb`, the first of FIRST_BUCKET_MB
    cap_mb          for wrappers without that setting: bucket size in MB (10^6 bytes); 0: one
                    gradient per bucket; None: no limit
    overlaps        reduces a bucket as soon as it is complete, while backward continues
    packs           copies gradients into one buffer even if they could be sent in place
    keeps_buckets   keeps buffers for all buckets, in addition to the gradients
    reduce_dtype    can reduce gradients in another dtype
    keeps_last      shards weights, but those of the block that is called last stay whole from forward
                    to backward
    is_torch        implemented by torch, for comparison
    resumes         its checkpoint can be loaded on another number of ranks
    graphs          works with torch.compile's CUDA graphs, which need weights at fixed addresses
    recorded        its all-reduce can be captured in a CUDA graph together with forward and
                    backward, because it never checks on the host whether data has arrived
    """

    gradient_sends: int
    weight_sends: int = 0
    stage: int = 0
    buckets: bool = False
    cap_mb: float | None = 0.0
    overlaps: bool = True
    packs: bool = False
    keeps_buckets: bool = False
    reduce_dtype: bool = False
    keeps_last: bool = False
    is_torch: bool = False
    resumes: bool = True
    graphs: bool = True
    recorded: bool = False

    def shards(self, part: str) -> bool:
        """Returns True if each rank has only its shard of `part`, one of SHARDED_PARTS."""
        return SHARDED_PARTS.index(part) < self.stage

    def plan_buckets(
        self,
        order_of_use: Sequence[Parameter],
        *,
        bucket_mb: float,
        owners: Mapping[str, int] | None = None,
    ) -> tuple[Bucket, ...]:
        """Returns the wrapper's buckets of trainable parameters: see spec.plan.buckets."""
        return plan_buckets(
            order_of_use,
            cap_mb=bucket_mb if self.buckets else self.cap_mb,
            first_mb=FIRST_BUCKET_MB if self.buckets else None,
            owners=owners,
            alone=not self.is_torch,
        )


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "none": Wrapper(gradient_sends=0, recorded=True),
        "naive": Wrapper(gradient_sends=2, overlaps=False, reduce_dtype=True, recorded=True),
        "flat": Wrapper(
            gradient_sends=2, cap_mb=None, overlaps=False, packs=True, reduce_dtype=True
        ),
        "overlapped": Wrapper(gradient_sends=2, reduce_dtype=True, recorded=True),
        "bucketed": Wrapper(gradient_sends=2, buckets=True, reduce_dtype=True, recorded=True),
        "zero1": Wrapper(
            gradient_sends=2,
            weight_sends=1,
            stage=1,
            buckets=True,
            reduce_dtype=True,
            recorded=True,
        ),
        "zero2": Wrapper(
            gradient_sends=1, weight_sends=1, stage=2, buckets=True, reduce_dtype=True
        ),
        "zero3": Wrapper(gradient_sends=1, weight_sends=2, stage=3, keeps_last=True, graphs=False),
        "torch-ddp": Wrapper(
            gradient_sends=2, buckets=True, keeps_buckets=True, reduce_dtype=True, is_torch=True
        ),
        "torch-ddp-views": Wrapper(
            gradient_sends=2, buckets=True, keeps_buckets=True, reduce_dtype=True, is_torch=True
        ),
        "torch-zero1": Wrapper(
            gradient_sends=2,
            weight_sends=1,
            stage=1,
            buckets=True,
            keeps_buckets=True,
            reduce_dtype=True,
            is_torch=True,
            resumes=False,
        ),
        "torch-fsdp": Wrapper(gradient_sends=1, weight_sends=2, stage=3, is_torch=True),
    }
)


def check_wrapper(
    name: str, *, device: str, compile: str, precision: str, reduce_dtype: str, checkpointing: str
) -> None:
    """Raises ValueError for settings that the wrapper does not support."""
    wrapper = WRAPPERS[name]
    compresses = wrapper.is_torch and wrapper.reduce_dtype and reduce_dtype != "own"
    if compresses and not device.startswith(("cuda", "auto")):
        raise ValueError(
            f"reduce_dtype is {reduce_dtype!r}, which {name} supports only on GPUs; device is "
            f"{device!r}"
        )
    if compile == "reduce-overhead" and not wrapper.graphs:
        raise ValueError(
            f"compile is {compile!r}, whose CUDA graphs need weights at fixed addresses; {name} "
            f"unshards and frees them: choose 'blocks'"
        )
    if name == "zero3" and checkpointing == "feed-forward" and compile == "off":
        raise ValueError(
            f"checkpointing is {checkpointing!r}, which under {name} needs compiled blocks: choose "
            f"--compile blocks"
        )
    if wrapper.shards("gradients") and precision == "fp16":
        raise ValueError(
            f"precision is 'fp16', whose loss scaling needs unsharded gradients; {name} shards "
            f"them: choose bf16"
        )
    if wrapper.shards("weights") and precision == "float8":
        raise ValueError(
            f"precision is 'float8', whose layers need unsharded weights; {name} shards them: "
            f"choose bf16"
        )


def sent_bytes(name: str, *, gradient_bytes: int, weight_bytes: int, ranks: int) -> float:
    """Returns the bytes that a rank sends per step with ring algorithms: mean over ranks."""
    wrapper = WRAPPERS[name]
    whole = wrapper.gradient_sends * gradient_bytes + wrapper.weight_sends * weight_bytes
    return (ranks - 1) / ranks * whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks on each axis, and how each axis works.

    data          ranks with different batches
    wrapper       reduces gradients over the data and context axes: a name in WRAPPERS
    context       ranks among which each sequence is split
    ulysses       these exchange heads for attention (all-to-all); otherwise keys go around a ring
    tensor        ranks among which each layer is split
    overlap       tensor parallel communication overlaps matrix products, if large (plan.tensor)
    torch_tensor  torch's tensor parallel instead, for comparison: one of TORCH_TENSOR
    pipeline      ranks with a run of layers each
    schedule      order of the pipeline's micro-batches; "" without a pipeline
    per_rank      stages per rank of an interleaved schedule; 0: two
    microbatches  micro-batches per step; with one, pipeline ranks work in turn

    Raises ValueError for an axis without ranks, an unknown wrapper, or settings that contradict
    each other.
    """

    data: int = 1
    wrapper: str = "none"
    context: int = 1
    ulysses: bool = False
    tensor: int = 1
    overlap: bool = False
    torch_tensor: str = ""
    pipeline: int = 1
    schedule: str = ""
    per_rank: int = 0
    microbatches: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "context", "tensor", "pipeline", "microbatches"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}; it must be at least 1")
        if self.wrapper not in WRAPPERS:
            raise ValueError(f"wrapper is {self.wrapper!r}; choose one of {', '.join(WRAPPERS)}")
        if self.num_replicas > 1 and self.wrapper == "none":
            axis = f"dp{self.data}" if self.data > 1 else f"cp{self.context}"
            raise ValueError(f"{axis} needs a wrapper, one of {', '.join(WRAPPERS)}")
        if self.ulysses and self.context == 1:
            raise ValueError(f"{ULYSSES} needs a context axis: add cp2 {SEPARATORS}")
        if self.overlap and self.tensor == 1:
            raise ValueError(f"overlap needs a tensor axis: add tp2 {SEPARATORS}")
        if self.torch_tensor and (self.ranks != self.tensor or self.tensor == 1 or self.overlap):
            raise ValueError(
                f"{self.torch_tensor} is torch's tensor parallel, which supports no other axis and no "
                f"{OVERLAP}: choose 'tp2 {self.torch_tensor}'"
            )
        if self.pipeline > 1 and not self.schedule:
            raise ValueError(
                f"pp{self.pipeline} has no schedule: add one of {', '.join(SCHEDULES)}, such as "
                f"'pp{self.pipeline} 1f1b m{max(self.microbatches, self.pipeline)}'"
            )
        if self.schedule and self.pipeline == 1:
            raise ValueError(f"schedule {self.schedule} needs a pipeline: add pp2 {SEPARATORS}")
        if self.per_rank and self.schedule not in LOOPED:
            raise ValueError(
                f"v{self.per_rank} needs a schedule with several stages per rank: "
                f"{' or '.join(LOOPED)}"
            )
        if self.per_rank == DEFAULT_PER_RANK:  # equal layouts have the same text
            object.__setattr__(self, "per_rank", 0)
        if self.microbatches > 1 and self.pipeline == 1:
            raise ValueError(
                f"m{self.microbatches} needs a pipeline, such as pp2 1f1b {SEPARATORS}"
            )

    @property
    def ranks(self) -> int:
        return self.num_replicas * self.tensor * self.pipeline

    @property
    def num_replicas(self) -> int:
        """Ranks among which the wrapper reduces gradients: data x context."""
        return self.data * self.context

    @property
    def gathers_weights(self) -> bool:
        """True if weights are unsharded around each block (ZeRO 3).

        False for a pipeline, where a stage unshards its weights once per step.
        """
        is_sharded = WRAPPERS[self.wrapper].shards("weights") and self.num_replicas > 1
        return is_sharded and self.pipeline == 1

    @property
    def launched(self) -> "Layout":
        """The part of the layout that changes the launches of a rank compared with one process.

        A pipeline counts without its wrapper, which does little in most of a stage's passes.
        """
        is_wrapped = self.pipeline == 1 and self.num_replicas > 1
        return Layout(
            data=self.data if is_wrapped else 1,
            wrapper=self.wrapper if is_wrapped else "none",
            context=self.context if is_wrapped else 1,
            ulysses=self.ulysses and is_wrapped,
            tensor=self.tensor,
            overlap=self.overlap,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each axis with more than one, in device mesh order: slowest varying first."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "context": self.context,
            "tensor": self.tensor,
        }
        return {axis: size for axis, size in sizes.items() if size > 1}

    def place(self, rank: int) -> dict[str, int]:
        """Returns the rank's index on each axis. The tensor axis varies fastest."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}

    def __str__(self) -> str:
        """Returns a text that `parse` turns into an equal layout."""
        words = [
            f"pp{self.pipeline}" if self.pipeline > 1 else "",
            self.schedule,
            f"v{self.per_rank}" if self.per_rank else "",
            f"m{self.microbatches}" if self.microbatches > 1 else "",
            f"dp{self.data}" if self.data > 1 else "",
            self.wrapper if self.wrapper != "none" else "",
            f"cp{self.context}" if self.context > 1 else "",
            ULYSSES if self.ulysses else "",
            f"tp{self.tensor}" if self.tensor > 1 else "",
            OVERLAP if self.overlap else "",
            self.torch_tensor,
        ]
        return " ".join(word for word in words if word) or "none"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a text such as "dp2 zero3 tp2", with its words in any order.

        A data or context axis without a wrapper gets "bucketed". Raises ValueError for an unknown
        word or a setting that is given twice.
        """
        given: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, value = _field_of(word.lower())
            if name in given:
                raise ValueError(f"layout {text!r} gives {name} twice")
            given[name] = value
        if given.get("data", 1) * given.get("context", 1) > 1:
            given.setdefault("wrapper", "bucketed")
        return cls(**given)


def require_data_axis(layout: Layout) -> None:
    """Raises ValueError for a wrapper without ranks among which it could reduce gradients."""
    if layout.num_replicas == 1 and layout.wrapper != "none":
        raise ValueError(
            f"{layout.wrapper} needs a data axis; layout is {str(layout)!r}: add dp2 {SEPARATORS}"
        )


AXES: Mapping[str, str] = {
    "dp": "data",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
    "v": "per_rank",
    "m": "microbatches",
}
OVERLAP = "overlap"
ULYSSES = "ulysses"
TORCH_TENSOR = ("torch-tp",)


def _field_of(word: str) -> tuple[str, Any]:
    """Returns the field of Layout that the word sets, and its value."""
    if word in WRAPPERS:
        return "wrapper", word
    if word in (OVERLAP, ULYSSES):
        return word, True
    if word in TORCH_TENSOR:
        return "torch_tensor", word
    if word in SCHEDULES:
        return "schedule", word
    if (match := re.fullmatch(r"(dp|cp|tp|pp|m|v)(\d{1,6})", word)) is not None:
        if int(match[2]) == 0:
            raise ValueError(f"layout has {word!r}; the number must be at least 1")
        return AXES[match[1]], int(match[2])
    names = [*WRAPPERS, *SCHEDULES, OVERLAP, ULYSSES, *TORCH_TENSOR]
    if similar := difflib.get_close_matches(word, names):
        raise ValueError(f"layout has {word!r}; did you mean {' or '.join(similar)}?")
    raise ValueError(
        f"layout has {word!r}; choose dpN, cpN, tpN, ppN, mN, vN with a number, a wrapper "
        f"({', '.join(WRAPPERS)}), a schedule ({', '.join(SCHEDULES)}), {OVERLAP}, {ULYSSES} or "
        f"torch's tensor parallel ({', '.join(TORCH_TENSOR)})"
    )
