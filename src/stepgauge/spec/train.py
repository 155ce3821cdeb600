"""A training run as it is asked for."""

import dataclasses
import math
from typing import ClassVar

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import as_in, check, option
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_rules import check_layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec, check_budget
from stepgauge.spec.user_model import UserModel, settle_user_model

DEFAULT_CORPUS = "stdlib"  # the source of Python's own standard library
BYTES = 256  # tokens are bytes: the vocabulary of a text
# torch's sharded optimizer has no state that another number of ranks could go on from.
TRAINING_WRAPPERS = tuple(name for name, wrapper in WRAPPERS.items() if wrapper.resumes)
# What an optimizer of a user's own has itself.
OF_OPTIMIZER = ("learning_rate", "weight_decay", "beta1", "beta2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What `train` runs. Tokens are bytes, so that the model's vocab_size is 256."""

    kind: ClassVar[str] = "train"

    model: ModelSpec | UserModel
    size: str = option("custom", "preset that the model spec starts from", label=True)
    corpus: str = option(
        DEFAULT_CORPUS,
        "text file or folder, read as bytes; stdlib is Python's own library's source",
    )
    steps: int = option(200, "optimizer steps", least=1, most=1_000_000_000)
    batch: int = option(
        8,
        "sequences a micro-batch, of all ranks",
        least=1,
        most=1_000_000,
        label=True,
        named_with="context_length",
    )
    accumulation: int = option(1, "micro-batches a step", least=1, most=1_000_000, label="changed")
    precision: str = as_in(WorkSpec, "precision")
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing")
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    memory_gib: float = as_in(WorkSpec, "memory_gib")
    learning_rate: float = option(1e-3, "the highest, reached after warm-up", least=0.0, most=100.0)
    final_learning_rate: float = option(
        0.1, "at the end, as a fraction of the highest", least=0.0, most=1.0
    )
    warmup: int = option(20, "steps of linear warm-up", least=0, most=1_000_000_000)
    weight_decay: float = option(0.1, "decoupled; on matrices only", least=0.0, most=100.0)
    beta1: float = option(0.9, "AdamW's decay of the mean", least=0.0, most=0.999999)
    beta2: float = option(0.95, "AdamW's decay of the square", least=0.0, most=0.999999)
    clip: float = option(1.0, "largest norm of the whole gradient; 0 for none", least=0.0)
    evaluate_every: int = option(50, "steps between held-out losses", least=1)
    evaluate_windows: int = option(
        64, "held-out sequences that are evaluated", least=1, most=1_000_000
    )
    checkpoint_every: int = option(50, "steps between checkpoints", least=1)
    keep: int = option(2, "checkpoints that are kept", least=1)
    data_parallel: str = option(
        "none", "how training is spread over ranks", choices=TRAINING_WRAPPERS, label="changed"
    )
    ranks: int = option(
        1, "processes, each with a device of its own", least=1, most=100_000, label="changed"
    )
    layout: str = option(
        "none",
        'how training is spread, by axes: "dp2 zero3 tp2", "pp2 1f1b m4"; in place of the two above',
        label="changed",
    )
    balance: str = as_in(LayoutSpec, "balance")
    bucket_mb: float = as_in(DataParallelSpec, "bucket_mb")
    reduce_dtype: str = as_in(DataParallelSpec, "reduce_dtype")
    device: str = option("cpu", "as in bench step; of several ranks cuda is each one's own")
    seed: int = option(0, "of weights and batches", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        check(self)
        check_budget(self)
        if isinstance(self.model, UserModel):
            settle_user_model(self)
        elif not isinstance(self.model, ModelSpec) or self.model.mask != "causal":
            raise ValueError(
                "train predicts the next token, which this network sees: choose one "
                "with a causal mask"
            )
        if self.layout != "none":
            self._settle_layout()
        self._check_ranks()
        self._check_layout()

    def _settle_layout(self) -> None:
        """One text for one layout, and its number of ranks. Raises ValueError where another option
        says otherwise.
        """
        layout = Layout.parse(self.layout)
        if self.data_parallel != "none":
            raise ValueError(
                f"layout is {self.layout!r} and data_parallel {self.data_parallel!r}; the layout "
                f"names the wrapper: leave --data-parallel out"
            )
        if self.ranks not in (1, layout.ranks):
            raise ValueError(f"ranks is {self.ranks}; layout {self.layout!r} is for {layout.ranks}")
        object.__setattr__(self, "layout", str(layout))
        object.__setattr__(self, "ranks", layout.ranks)

    def _check_ranks(self) -> None:
        """That several ranks have a way to train together, and to go on elsewhere."""
        if self.ranks > 1 and self.data_parallel == self.layout == "none":
            raise ValueError(
                f"ranks is {self.ranks}; --data-parallel or --layout says how they train: choose "
                f"one of {', '.join(TRAINING_WRAPPERS[1:])}"
            )
        if self.parsed_layout.torch_tensor:
            raise ValueError(
                f"layout is {self.layout!r}; {self.parsed_layout.torch_tensor} is there to compare with, in "
                f"bench layout: choose 'tp{self.parsed_layout.tensor}'"
            )
        if self.parsed_layout.wrapper not in TRAINING_WRAPPERS:
            raise ValueError(
                f"layout is {self.layout!r}, and {self.parsed_layout.wrapper} has no checkpoint that other "
                f"ranks could go on from: choose one of {', '.join(TRAINING_WRAPPERS)}"
            )

    def _check_layout(self) -> None:
        wrapper = self.parsed_layout.wrapper
        names = ("batch", "device", "compile", "precision", "reduce_dtype", "checkpointing")
        check_layout(
            self.parsed_layout, self.model, **{name: getattr(self, name) for name in names}
        )
        if self.reduce_dtype != "own" and not WRAPPERS[wrapper].reduce_dtype:
            takers = [name for name in TRAINING_WRAPPERS if WRAPPERS[name].reduce_dtype]
            raise ValueError(
                f"reduce_dtype is {self.reduce_dtype!r}, which {wrapper} has no use for: choose "
                f"one of {', '.join(takers)}"
            )
        if self.ranks == 1 and wrapper != "none":
            raise ValueError(
                f"data_parallel is {wrapper!r}, which one rank has no use for: give --ranks"
            )

    @property
    def parsed_layout(self) -> Layout:
        if self.layout != "none":
            return Layout.parse(self.layout)
        return Layout(data=self.ranks, wrapper=self.data_parallel)

    @property
    def network(self) -> ModelSpec:
        """The model, where its shape is known: of a user's it is not."""
        assert not isinstance(self.model, UserModel)
        return self.model

    def rates_depend_on_steps(self, done: int) -> bool:
        """Whether another number of steps would have given the first `done` other rates."""
        return self.final_learning_rate != 1.0 and done > self.warmup

    def learning_rate_at(self, step: int, *, highest: float) -> float:
        """Rate of step 0, 1, ...: linear warm-up to the highest, then half a cosine down to the
        final fraction of it at the last step.
        """
        if step < self.warmup:
            return highest * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return highest * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)
