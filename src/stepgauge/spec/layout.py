"""How a network is spread over ranks: one object, and one table of what each wrapper can do.

A layout has up to four axes. `data` copies or shards the network over ranks with different
batches, `context` cuts each sequence, `tensor` each layer, and `pipeline` gives each rank a run of
layers. Its text names what is not the default: "dp2 zero3 tp2 overlap", "cp2", "pp4 zbv m8",
"none".
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from stepgauge.spec.plan.buckets import FIRST_BUCKET_MB, Bucket, Parameter, plan_buckets
from stepgauge.spec.plan.pipeline.schedules import DEFAULT_PER_RANK, LOOPED, SCHEDULES

SHARDED_PARTS = ("optimizer state", "gradients", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """What a way of data parallel training does.

    gradient_sends  how often a step sends a share (N−1)/N of all gradients, by ring algorithms
    weight_sends    the same of all weights
    stage           ZeRO stage: how many of SHARDED_PARTS a rank has its share of only
    buckets         gradients travel in buckets of `bucket_mb`, the first of FIRST_BUCKET_MB
    cap_mb          MB (10^6 bytes) at which other wrappers close a bucket; 0: one a gradient; None:
                    no limit
    overlaps        a bucket is sent as soon as it is complete, while backward goes on
    packs           gradients are copied behind each other where they could be sent as they lie
    keeps_buckets   memory for all buckets stays, beside the gradients
    reduce_dtype    gradients can be averaged in a type of the user's choice
    is_torch        torch's own, to compare with
    resumes         its checkpoint can be loaded by another number of ranks
    graphs          takes CUDA graphs, which read weights where they were when they were recorded
    recorded        its averaging can be recorded with forward and backward as one CUDA graph: it
                    asks no message whether it has arrived
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
    is_torch: bool = False
    resumes: bool = True
    graphs: bool = True
    recorded: bool = False

    def shards(self, part: str) -> bool:
        """Whether a rank has only its share of one of SHARDED_PARTS."""
        return SHARDED_PARTS.index(part) < self.stage

    def plan_buckets(
        self,
        order_of_use: Sequence[Parameter],
        *,
        bucket_mb: float,
        owners: Mapping[str, int] | None = None,
    ) -> tuple[Bucket, ...]:
        """The buckets of trained parameters, as `spec.plan.buckets.plan_buckets` makes them."""
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
        "zero3": Wrapper(gradient_sends=1, weight_sends=2, stage=3, graphs=False),
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
    """Raises ValueError for what the wrapper cannot do."""
    wrapper = WRAPPERS[name]
    compresses = wrapper.is_torch and wrapper.reduce_dtype and reduce_dtype != "own"
    if compresses and not device.startswith(("cuda", "auto")):
        raise ValueError(
            f"reduce_dtype is {reduce_dtype!r}; {name} compresses on GPUs only, device is "
            f"{device!r}"
        )
    if compile == "reduce-overhead" and not wrapper.graphs:
        raise ValueError(
            f"compile is {compile!r}, whose CUDA graphs need weights that stay in one place; {name} "
            f"gathers and frees them: choose 'blocks'"
        )
    if name == "zero3" and checkpointing == "feed-forward" and compile == "off":
        raise ValueError(
            f"checkpointing is {checkpointing!r}, which looks for a block's weights in backward, when "
            f"{name} has them for autograd and compiled code alone: choose --compile blocks"
        )
    if wrapper.shards("gradients") and precision == "fp16":
        raise ValueError(
            f"precision is 'fp16', whose loss scale needs every rank's whole gradients; {name} "
            f"has shares of them: choose bf16"
        )
    if wrapper.shards("weights") and precision == "float8":
        raise ValueError(
            f"precision is 'float8', whose layers need whole weights; {name} has shares of them: "
            f"choose bf16"
        )


def sent_bytes(name: str, *, gradient_bytes: int, weight_bytes: int, ranks: int) -> float:
    """Bytes that a rank sends in a step, by the counts of ring algorithms, as a mean over ranks."""
    wrapper = WRAPPERS[name]
    whole = wrapper.gradient_sends * gradient_bytes + wrapper.weight_sends * weight_bytes
    return (ranks - 1) / ranks * whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks by axis, and how each axis is used.

    data          ranks that train on batches of their own
    wrapper       how they, and those of `context`, are kept equal: a name of WRAPPERS
    context       ranks that share each sequence
    ulysses       these exchange heads for attention; otherwise keys travel around a ring
    tensor        ranks that share each layer
    overlap       what they send runs beside products, where it is large enough (plan.tensor)
    torch_tensor  torch's own tensor parallel in place of ours, to compare with: of TORCH_TENSOR
    pipeline      ranks that hold a run of layers each
    schedule      order of a pipeline's micro-batches; "" without a pipeline
    per_rank      stages a rank of an interleaved schedule; 0: two
    microbatches  parts of a batch that pass the pipeline one behind the other

    Raises ValueError for an axis without ranks, an unknown wrapper, or parts that do not go
    together.
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
            raise ValueError(f"{ULYSSES} needs a context axis: add cp2")
        if self.overlap and self.tensor == 1:
            raise ValueError("overlap needs a tensor axis: add tp2")
        if self.torch_tensor and (self.ranks != self.tensor or self.tensor == 1 or self.overlap):
            raise ValueError(
                f"{self.torch_tensor} is torch's own tensor parallel, and has no other axis and no "
                f"{OVERLAP}: choose 'tp2 {self.torch_tensor}'"
            )
        if self.pipeline > 1 and not self.schedule:
            raise ValueError(
                f"pp{self.pipeline} has no schedule: add one of {', '.join(SCHEDULES)}, such as "
                f"'pp{self.pipeline} 1f1b m{max(self.microbatches, self.pipeline)}'"
            )
        if self.schedule and self.pipeline == 1:
            raise ValueError(f"schedule {self.schedule} needs a pipeline: add pp2")
        if self.per_rank and self.schedule not in LOOPED:
            raise ValueError(
                f"v{self.per_rank} needs a schedule of several stages a rank: {' or '.join(LOOPED)}"
            )
        if self.per_rank == DEFAULT_PER_RANK:  # one text for one layout
            object.__setattr__(self, "per_rank", 0)
        if self.microbatches > 1 and self.pipeline == 1:
            raise ValueError(f"m{self.microbatches} needs a pipeline, such as pp2 1f1b")

    @property
    def ranks(self) -> int:
        return self.num_replicas * self.tensor * self.pipeline

    @property
    def num_replicas(self) -> int:
        """Ranks that the wrapper keeps equal: each computes a part of the same weights' gradients."""
        return self.data * self.context

    @property
    def gathers_weights(self) -> bool:
        """Whether replicas gather each other's parts of the weights before they compute (ZeRO 3). A
        stage of a pipeline has them whole for a step.
        """
        is_sharded = WRAPPERS[self.wrapper].shards("weights") and self.num_replicas > 1
        return is_sharded and self.pipeline == 1

    @property
    def launched(self) -> "Layout":
        """What of the layout the host of a rank launches otherwise than one process does. The
        wrapper of a stage of a pipeline does little in most of its passes.
        """
        is_wrapped = self.pipeline == 1 and self.num_replicas > 1
        return Layout(
            data=self.data if is_wrapped else 1,
            wrapper=self.wrapper if is_wrapped else "none",
            context=self.context if is_wrapped else 1,
            tensor=self.tensor,
            overlap=self.overlap,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each axis that has several, in the order of a device mesh, slowest first."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "context": self.context,
            "tensor": self.tensor,
        }
        return {axis: size for axis, size in sizes.items() if size > 1}

    def place(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis: neighbouring ranks are on the tensor axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}

    def __str__(self) -> str:
        """What `parse` reads back to an equal layout."""
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
        """The layout of a text such as "dp2 zero3 tp2", its words in any order.

        A data or context axis without a wrapper is bucketed. Raises ValueError for a word that says nothing,
        or that is said twice.
        """
        given: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, value = _meaning(word.lower())
            if name in given:
                raise ValueError(f"layout {text!r} gives {name} twice")
            given[name] = value
        if given.get("data", 1) * given.get("context", 1) > 1:
            given.setdefault("wrapper", "bucketed")
        return cls(**given)


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


def _meaning(word: str) -> tuple[str, Any]:
    """The field of a Layout that a word sets, and its value."""
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
    raise ValueError(
        f"layout has {word!r}; choose dpN, cpN, tpN, ppN, mN, vN with a number, a wrapper "
        f"({', '.join(WRAPPERS)}), a schedule ({', '.join(SCHEDULES)}), {OVERLAP}, {ULYSSES} or torch's "
        f"tensor parallel ({', '.join(TORCH_TENSOR)})"
    )
