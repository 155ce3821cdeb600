"""The spec of `train`: a training run."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import DEVICE_HELP, as_in, check, option
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_rules import check_layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec, check_budget
from stepgauge.spec.user_model import UserModel, settle_user_model

DEFAULT_CORPUS = "stdlib"  # the source code of Python's standard library
BYTES = 256  # vocabulary size of a text, whose tokens are bytes
# Excludes torch's sharded optimizer, whose state cannot be loaded on another number of ranks.
TRAINING_WRAPPERS = tuple(name for name, wrapper in WRAPPERS.items() if wrapper.resumes)
# Options that do not apply if a user's model brings its own optimizer.
OPTIMIZER_FIELDS = ("learning_rate", "weight_decay", "beta1", "beta2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The run of `train`. Tokens are bytes, so that the model's vocab_size must be 256."""

    kind: ClassVar[str] = "train"

    model: ModelSpec | UserModel
    size: str = option("custom", "Preset network", label=True)
    corpus: str = option(
        DEFAULT_CORPUS,
        "Text file or folder, read as bytes; stdlib: source of Python's standard library",
    )
    steps: int = option(200, "Optimizer steps", least=1, most=1_000_000_000)
    batch: int = option(
        8,
        "Sequences per micro-batch, over all ranks",
        least=1,
        most=1_000_000,
        label=True,
        named_with="context_length",
    )
    accumulation: int = option(
        1, "Gradient accumulation: micro-batches per step", least=1, most=1_000_000, label="changed"
    )
    precision: str = as_in(WorkSpec, "precision")
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing")
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    memory_gib: float = as_in(WorkSpec, "memory_gib")
    learning_rate: float = option(
        1e-3, "Highest learning rate, reached after warm-up", least=0.0, most=100.0
    )
    final_learning_rate: float = option(
        0.1, "Last learning rate, as a fraction of the highest", least=0.0, most=1.0
    )
    warmup: int = option(20, "Steps of linear warm-up", least=0, most=1_000_000_000)
    weight_decay: float = option(
        0.1, "Decoupled weight decay, on matrices only", least=0.0, most=100.0
    )
    beta1: float = option(0.9, "AdamW's beta1, the decay of the mean", least=0.0, most=0.999999)
    beta2: float = option(
        0.95, "AdamW's beta2, the decay of the mean square", least=0.0, most=0.999999
    )
    clip: float = option(1.0, "Clip the gradient to this norm; 0: no clipping", least=0.0)
    evaluate_every: int = option(50, "Steps between evaluations", least=1)
    evaluate_windows: int = option(64, "Held-out sequences per evaluation", least=1, most=1_000_000)
    checkpoint_every: int = option(50, "Steps between checkpoints", least=1)
    keep: int = option(2, "Number of checkpoints to keep", least=1)
    data_parallel: str = option(
        "none", "Data parallel wrapper", choices=TRAINING_WRAPPERS, label="changed"
    )
    ranks: int = option(
        1, "Number of processes, each on its own device", least=1, most=100_000, label="changed"
    )
    layout: str = option(
        "none",
        'Parallel layout, such as "dp2 zero3 tp2" or "pp2 1f1b m4"; instead of --data-parallel and --ranks',
        label="changed",
    )
    balance: str = as_in(LayoutSpec, "balance")
    bucket_mb: float = as_in(DataParallelSpec, "bucket_mb")
    reduce_dtype: str = as_in(DataParallelSpec, "reduce_dtype")
    device: str = option("cpu", f"{DEVICE_HELP}; on several ranks, cuda is one GPU per rank")
    seed: int = option(0, "Seed of weights and batches", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        check(self)
        check_budget(self)
        settle_user_model(self)
        if self.is_text and getattr(self.model, "mask", "") != "causal":
            raise ValueError(
                "train predicts the next token, which this network can see: choose one with a "
                "causal mask"
            )
        if self.layout != "none":
            self._settle_layout()
        self._check_ranks()
        self._check_layout()

    def _settle_layout(self) -> None:
        """Normalises the layout's text and sets `ranks`. Raises ValueError if options contradict it."""
        layout = Layout.parse(self.layout)
        if self.data_parallel != "none":
            raise ValueError(
                f"layout is {self.layout!r} and data_parallel {self.data_parallel!r}; the layout "
                f"includes the wrapper: leave data_parallel out"
            )
        if self.ranks not in (1, layout.ranks):
            raise ValueError(f"ranks is {self.ranks}; layout {self.layout!r} has {layout.ranks}")
        object.__setattr__(self, "layout", str(layout))
        object.__setattr__(self, "ranks", layout.ranks)

    def _check_ranks(self) -> None:
        """Raises ValueError unless the ranks can train together and resume on other ranks."""
        if self.ranks > 1 and self.data_parallel == self.layout == "none":
            raise ValueError(
                f"ranks is {self.ranks}, which needs --layout or --data-parallel: choose one of "
                f"{', '.join(TRAINING_WRAPPERS[1:])}"
            )
        if self.ranks == 1 and self.data_parallel != "none":
            raise ValueError(
                f"data_parallel is {self.data_parallel!r}, which has no effect on one rank: give "
                f"--ranks"
            )
        if self.parsed_layout.torch_tensor:
            raise ValueError(
                f"layout is {self.layout!r}; {self.parsed_layout.torch_tensor} is only for "
                f"comparisons in bench layout: choose 'tp{self.parsed_layout.tensor}'"
            )
        if self.parsed_layout.wrapper not in TRAINING_WRAPPERS:
            raise ValueError(
                f"layout is {self.layout!r}; checkpoints of {self.parsed_layout.wrapper} cannot be "
                f"loaded on other ranks: choose one of {', '.join(TRAINING_WRAPPERS)}"
            )

    def _check_layout(self) -> None:
        wrapper = self.parsed_layout.wrapper
        names = ("batch", "device", "compile", "precision", "reduce_dtype", "checkpointing")
        check_layout(
            self.parsed_layout, self.model, **{name: getattr(self, name) for name in names}
        )
        if self.reduce_dtype != "own" and not WRAPPERS[wrapper].reduce_dtype:
            supporting = [name for name in TRAINING_WRAPPERS if WRAPPERS[name].reduce_dtype]
            raise ValueError(
                f"reduce_dtype is {self.reduce_dtype!r}, which has no effect with {wrapper}: choose "
                f"one of {', '.join(supporting)}"
            )

    @property
    def parsed_layout(self) -> Layout:
        """The layout, whether given as `layout` or as `data_parallel` and `ranks`."""
        return layout_of(vars(self))

    @property
    def is_text(self) -> bool:
        """True if it trains on the corpus; a user's model trains on its factory's batches."""
        return not isinstance(self.model, UserModel)

    @property
    def network(self) -> ModelSpec:
        """The model, which must not be a user's, because its shape must be known."""
        assert isinstance(self.model, ModelSpec)
        return self.model

    def rates_depend_on_steps(self, done: int) -> bool:
        """Returns True if the rates of the first `done` steps depend on the total number of steps."""
        return self.final_learning_rate != 1.0 and done > self.warmup

    def learning_rate_at(self, step: int, *, highest: float) -> float:
        """Returns the learning rate of a step, counted from 0.

        It rises linearly during warm-up, then falls along half a cosine to the final fraction of
        the highest rate at the last step.
        """
        if step < self.warmup:
            return highest * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return highest * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def layout_of(spec: Mapping[str, Any]) -> Layout:
    """Returns the layout of a TrainSpec's values, also of those in a record."""
    if spec["layout"] != "none":
        return Layout.parse(spec["layout"])
    return Layout(data=spec["ranks"], wrapper=spec["data_parallel"])
