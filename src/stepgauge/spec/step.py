"""One training step as it is asked for: network, batch, precision and how it is timed."""

import dataclasses
from typing import Any, ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import check, option, with_defaults
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.user_model import UserModel, settle_user_model

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-pure", "bf16-master")
NARROW = ("bf16", "fp16", "bf16-pure", "bf16-master")  # products have 16-bit operands
FLOAT8 = "float8"  # by a package that may be missing: asked for by name, never part of a study
COMPILE_MODES = ("off", "on", "blocks", "reduce-overhead", "max-autotune")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-loop", "fused", "sgd")
# What forward does not keep and backward computes again: nothing; blocks; blocks, and within them
# each block; all but the results of matrix products and attention; all but attention and its products.
CHECKPOINTING = ("none", "blocks", "nested", "selective", "feed-forward")
# Of one process also what of these fits into memory, block by block: spec.plan.recompute.
BUDGET = "budget"
# What a timed step contains: no-grad forward; forward and backward; both and the optimizer.
PHASES = ("forward", "backward", "step")
TRAINING_PHASES = ("forward", "backward", "optimizer")  # that a whole step is timed in


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkSpec:
    """What a training step does. The sequence length is the model's context_length."""

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "preset that the model spec starts from", label=True)
    batch: int = option(
        4, "sequences in a batch", least=1, most=1_000_000, label=True, named_with="context_length"
    )
    precision: str = option(
        "fp32",
        "bf16 and fp16 are autocast, fp16 with loss scaling; bf16-pure has bf16 parameters, "
        "bf16-master fp32 masters of them in the optimizer; float8: bf16 with torchao's linear "
        "layers",
        choices=(*PRECISIONS, FLOAT8),
        label=True,
    )
    compile: str = option(
        "off",
        "torch.compile; on: the whole model",
        choices=COMPILE_MODES,
        flag_value="on",
        label="changed",
    )
    optimizer: str = option(
        "adamw", "adamw is torch's fused one, fused is ours", choices=OPTIMIZERS, label="changed"
    )
    checkpointing: str = option(
        "none",
        "what backward computes again; selective keeps products and attention, feed-forward "
        "attention with its products; budget: the least, block by block, that fits into "
        "--memory-gib",
        choices=(*CHECKPOINTING, BUDGET),
        label="changed",
        named_with="checkpoint_blocks",
    )
    checkpoint_blocks: int = option(
        1, "blocks that are computed again together", least=1, most=10_000
    )
    memory_gib: float = option(
        0.0,
        "GiB that a step with --checkpointing budget may take; 0: what is free",
        least=0.0,
        most=1e6,
        label="changed",
    )
    phases: str = option(
        "step",
        "forward alone without gradients; backward with its forward; or the whole step",
        choices=PHASES,
        label="changed",
    )
    data: str = option(
        "random",
        "tokens: random, or the default corpus as bytes",
        choices=("random", "text"),
        label="changed",
    )
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")
    seed: int = option(0, "of weights and tokens", least=0, most=2**63 - 1, label="changed")

    accumulation: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.model, UserModel):
            settle_user_model(self)
        check_budget(self)
        check_gate(self)

    def canonical(self) -> Self:
        """With defaults for the options that the step has no use for: blocks without checkpointing,
        an optimizer that never steps.
        """
        used = {
            "checkpoint_blocks": self.checkpointing not in ("none", BUDGET),
            "memory_gib": self.checkpointing == BUDGET,
            "optimizer": self.phases == "step",
        }
        return with_defaults(self, used)

    @property
    def parsed_layout(self) -> Layout:
        """Of one process."""
        return Layout()

    @property
    def network(self) -> ModelSpec | BertSpec:
        """The model, where its shape is known: of a user's it is not."""
        assert not isinstance(self.model, UserModel)
        return self.model


def check_budget(spec: Any) -> None:
    """Raises ValueError for a budget of phases in which nothing is kept, or of several passes."""
    if spec.checkpointing != BUDGET:
        return
    if getattr(spec, "phases", "step") != "step":
        raise ValueError(f"phases is {spec.phases!r}; --checkpointing budget is that of a step")
    if (passes := getattr(spec, "accumulation", 1)) > 1:
        raise ValueError(
            f"accumulation is {passes}; --checkpointing budget is solved for one forward and "
            f"backward a step"
        )


def check_gate(spec: WorkSpec) -> None:
    """Raises ValueError for kernels of SwiGLU's gate that do not compute in the step's precision."""
    gate = getattr(spec.model, "gate", "torch")
    if gate != "torch" and spec.device.startswith("cuda") and spec.precision not in NARROW:
        raise ValueError(
            f"gate is {gate!r}, which computes in 16 bits on a GPU; precision is "
            f"{spec.precision!r}: choose one of {', '.join(NARROW)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec(WorkSpec):
    """What `bench step` runs for one row."""

    kind: ClassVar[str] = "step"

    warmup: int = option(5, "untimed steps first", least=0, most=100_000)
    steps: int = option(10, "timed steps, at least", least=1, most=1_000_000)
    seconds: float = option(1.0, "go on timing for this long", least=0.0, most=86_400.0)

    # Of one process, as specs of several ranks have them.
    ranks: ClassVar[int] = 1
    group_backend: ClassVar[str] = ""

    @property
    def micro_batch(self) -> int:
        return self.batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.network.context_length
