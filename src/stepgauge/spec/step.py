"""The spec of one training step: network, batch, precision and timing."""

import dataclasses
from typing import Any, ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import DEVICE_HELP, check, option, with_defaults
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.user_model import OfNetwork, UserModel, settle_user_model

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-pure", "bf16-master")
NARROW = ("bf16", "fp16", "bf16-pure", "bf16-master")  # matrix products with 16-bit operands
NARROW_ATTENTIONS = ("sdpa-flash", "sdpa-cudnn")  # run such products only, on a GPU
FLOAT8 = "float8"  # needs torchao, which is optional: never part of a study
COMPILE_MODES = ("off", "on", "blocks", "reduce-overhead", "max-autotune")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-loop", "fused", "sgd")
# What backward recomputes because forward does not keep it. none: nothing; blocks: groups of blocks;
# nested: groups, and within each group every block; selective: everything except matrix products and
# attention; feed-forward: everything except attention and its matrix products.
CHECKPOINTING = ("none", "blocks", "nested", "selective", "feed-forward")
# Chooses one of these for each block, so that the step fits into memory: spec.plan.recompute.
BUDGET = "budget"
PRECISION_HELP = (
    "bf16 and fp16 use autocast, fp16 also loss scaling; bf16-pure has bf16 parameters, bf16-master "
    "also fp32 master weights in the optimizer"
)
CHECKPOINTING_HELP = (
    "What backward recomputes; selective keeps matrix products and attention, feed-forward keeps "
    "attention and its matrix products"
)
# What a timed step contains: no-grad forward; forward and backward; both and the optimizer.
PHASES = ("forward", "backward", "step")
TRAINING_PHASES = ("forward", "backward", "optimizer")  # the parts of a whole step


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkSpec(OfNetwork):
    """The work of a training step. The sequence length is the model's context_length."""

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "Preset network", label=True)
    batch: int = option(
        4, "Sequences per batch", least=1, most=1_000_000, label=True, named_with="context_length"
    )
    precision: str = option(
        "fp32",
        PRECISION_HELP + "; float8 is bf16 with torchao's float8 linear layers",
        choices=(*PRECISIONS, FLOAT8),
        label=True,
    )
    compile: str = option(
        "off",
        "torch.compile; on: the whole model, blocks: each block; the others are modes",
        choices=COMPILE_MODES,
        flag_value="on",
        label="changed",
    )
    optimizer: str = option(
        "adamw",
        "Optimizer; adamw is torch's fused AdamW, fused is this package's kernel",
        choices=OPTIMIZERS,
        label="changed",
    )
    checkpointing: str = option(
        "none",
        CHECKPOINTING_HELP + "; budget recomputes as little as --memory-gib allows",
        choices=(*CHECKPOINTING, BUDGET),
        label="changed",
        named_with="checkpoint_blocks",
    )
    checkpoint_blocks: int = option(1, "Consecutive blocks per checkpoint", least=1, most=10_000)
    memory_gib: float = option(
        0.0,
        "Memory limit in GiB for --checkpointing budget; 0: the free memory",
        least=0.0,
        most=1e6,
        label="changed",
    )
    phases: str = option(
        "step",
        "Phases to time; forward: without gradients, backward: forward and backward",
        choices=PHASES,
        label="changed",
    )
    data: str = option(
        "random",
        "Tokens: random, or text of the default corpus as bytes",
        choices=("random", "text"),
        label="changed",
    )
    device: str = option("cpu", DEVICE_HELP)
    seed: int = option(0, "Seed of weights and tokens", least=0, most=2**63 - 1, label="changed")

    accumulation: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        settle_user_model(self)
        check_budget(self)
        check_kernels(self)

    def canonical(self) -> Self:
        """Resets options without effect, such as the optimizer of a forward."""
        used = {
            "checkpoint_blocks": self.checkpointing not in ("none", BUDGET),
            "memory_gib": self.checkpointing == BUDGET,
            "optimizer": self.phases == "step",
        }
        return with_defaults(self, used)

    @property
    def parsed_layout(self) -> Layout:
        """The layout of one process."""
        return Layout()


def check_budget(spec: Any) -> None:
    """Raises ValueError if --checkpointing budget is not for a whole step with one backward."""
    if spec.checkpointing != BUDGET:
        return
    if getattr(spec, "phases", "step") != "step":
        raise ValueError(f"phases is {spec.phases!r}; --checkpointing budget needs step")
    if (passes := getattr(spec, "accumulation", 1)) > 1:
        raise ValueError(f"accumulation is {passes}; --checkpointing budget needs 1")


def check_kernels(spec: Any) -> None:
    """Raises ValueError if a kernel of the network does not support the precision on a GPU."""
    if not spec.device.startswith("cuda"):
        return
    limited = (("gate", ("quack",), NARROW), ("attention", NARROW_ATTENTIONS, (*NARROW, FLOAT8)))
    for field, kernels, supported in limited:
        value = getattr(spec.model, field, "")
        if value in kernels and spec.precision not in supported:
            raise ValueError(
                f"{field} is {value!r}, which supports only 16-bit types on a GPU; precision is "
                f"{spec.precision!r}: choose one of {', '.join(NARROW)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec(WorkSpec):
    """One row of `bench step`."""

    kind: ClassVar[str] = "step"

    warmup: int = option(5, "Warm-up steps, not timed", least=0, most=100_000)
    steps: int = option(10, "Minimum number of timed steps", least=1, most=1_000_000)
    seconds: float = option(1.0, "Minimum seconds of timing", least=0.0, most=86_400.0)

    # A single process, with the attributes that specs of several ranks have.
    ranks: ClassVar[int] = 1
    group_backend: ClassVar[str] = ""

    @property
    def micro_batch(self) -> int:
        return self.batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.network.context_length
