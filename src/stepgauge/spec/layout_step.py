"""A training step under a layout as it is asked for: network, axes, batch and how it is timed."""

import dataclasses
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec, OnBackend
from stepgauge.spec.fields import as_in, check, option, with_defaults
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_rules import check_layout, check_recorded, schedule_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.stages import BY_TIMES, FLOPS, STEP, PartTimes, cut_blocks
from stepgauge.spec.step import BUDGET, CHECKPOINTING, WorkSpec, check_budget
from stepgauge.spec.user_model import UserModel, settle_user_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSpec(OnBackend):
    """What `bench layout` runs for one row. The sequence length is the model's context_length; the
    batch is that of all ranks, so that layouts of one batch do the same step; of a user's model each
    data rank has one.

    Raises ValueError for a text that is no layout, and for what does not go together.
    """

    kind: ClassVar[str] = "layout"

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "preset that the model spec starts from", label=True)
    layout: str = option(
        "none",
        'how the network is spread: "dp2 zero3 tp2", "pp2 1f1b m8 tp2"; none: one process',
        label=True,
    )
    batch: int = option(
        8,
        "sequences of a forward and backward, of all ranks",
        least=1,
        most=1_000_000,
        label=True,
        named_with="context_length",
    )
    accumulation: int = option(
        1,
        "forwards and backwards before the optimizer steps",
        least=1,
        most=1_000_000,
        label="changed",
    )
    balance: str = option(
        FLOPS,
        "how blocks are cut into the stages of a pipeline: by their FLOPs and the head's, by time, "
        "measured at the start (predictions: the hardware file's), or for the shortest step that is "
        "simulated with such times",
        choices=(FLOPS, *BY_TIMES),
        label="changed",
    )
    bucket_mb: float = as_in(DataParallelSpec, "bucket_mb")
    reduce_dtype: str = as_in(DataParallelSpec, "reduce_dtype")
    backend: str = as_in(DataParallelSpec, "backend")
    precision: str = as_in(WorkSpec, "precision")
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(
        WorkSpec,
        "checkpointing",
        "what backward computes again; selective keeps products and attention, feed-forward "
        "attention with its products",
        choices=(*CHECKPOINTING, BUDGET),
    )
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    memory_gib: float = as_in(WorkSpec, "memory_gib")
    cuda_graphs: bool = option(
        False,
        "record forward and backward of each stage of a pipeline once as CUDA graphs, and replay "
        "them",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(5, "untimed steps first", least=1, most=100_000)
    steps: int = option(10, "timed steps", least=1, most=1_000_000)
    device: str = option("cpu", "cpu or cuda: each rank takes the GPU of its own number")
    seed: int = as_in(DataParallelSpec, "seed")

    phases: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)
        check_budget(self)
        if isinstance(self.model, UserModel):
            settle_user_model(self)
        # one text for one layout, whatever the order of its words
        object.__setattr__(self, "layout", str(Layout.parse(self.layout)))
        self.check_backend()
        check_layout(
            self.parsed_layout,
            self.model,
            batch=self.batch,
            device=self.device,
            precision=self.precision,
            compile=self.compile,
            reduce_dtype=self.reduce_dtype,
            checkpointing=self.checkpointing,
        )
        if self.cuda_graphs:
            check_recorded(self.parsed_layout, device=self.device)

    def canonical(self) -> Self:
        """With defaults for the options that the layout has no use for."""
        wrapper = WRAPPERS[self.parsed_layout.wrapper]
        used = {
            "bucket_mb": wrapper.buckets,
            "reduce_dtype": wrapper.reduce_dtype,
            "checkpoint_blocks": self.checkpointing not in ("none", BUDGET),
            "memory_gib": self.checkpointing == BUDGET,
            "balance": self.parsed_layout.pipeline > 1,
        }
        return with_defaults(self, used)

    @property
    def network(self) -> ModelSpec | BertSpec:
        """The model, where its shape is known: of a user's it is not."""
        assert not isinstance(self.model, UserModel)
        return self.model

    @property
    def parsed_layout(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def ranks(self) -> int:
        return self.parsed_layout.ranks

    @property
    def rank_batch(self) -> int:
        """Sequences of a forward and backward on each data rank; of a user's model its one batch."""
        is_users = isinstance(self.model, UserModel)
        return self.batch if is_users else self.batch // self.parsed_layout.data

    @property
    def micro_batch(self) -> int:
        """Sequences that pass a pipeline's stage together; without a pipeline all of a data rank. Of
        a user's model 1: a part of its one batch.
        """
        is_users = isinstance(self.model, UserModel)
        return 1 if is_users else self.rank_batch // self.parsed_layout.microbatches

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulation * self.network.context_length

    def schedule(self) -> Schedule | None:
        """The order of the pipeline's work, not lowered; None without a pipeline."""
        return schedule_of(self.parsed_layout) if self.parsed_layout.pipeline > 1 else None

    @property
    def needs_times(self) -> bool:
        """Whether `stages` needs the times of the network's parts."""
        return self.parsed_layout.pipeline > 1 and self.balance in BY_TIMES

    def stages(self, times: PartTimes | None = None) -> list[range]:
        """The blocks of each stage of the pipeline; all in one without a pipeline.

        times  for a spec that needs_times. cost/pipeline/cuts.py has those of one balanced by the
               step
        """
        assert times is not None or not self.needs_times, "whoever runs or predicts it has them"
        schedule = self.schedule()
        if schedule is None:
            return [range(self.network.num_layers)]
        assert self.balance != STEP, "whoever simulates cuts"
        return cut_blocks(self.network, schedule, times)
