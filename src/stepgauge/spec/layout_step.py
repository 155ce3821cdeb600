"""The spec of a training step under a layout: network, axes, batch and timing."""

import dataclasses
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec, OnBackend
from stepgauge.spec.fields import RANKS_DEVICE_HELP, as_in, check, option, with_defaults
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_rules import check_layout, check_recorded, schedule_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.stages import BY_TIMES, FLOPS, STEP, PartTimes, cut_blocks
from stepgauge.spec.step import BUDGET, WorkSpec, check_budget, check_kernels
from stepgauge.spec.user_model import OfNetwork, UserModel, settle_user_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSpec(OfNetwork, OnBackend):
    """One row of `bench layout`. The sequence length is the model's context_length.

    The batch is that of all ranks, so that layouts with the same batch do the same step. A user's
    model brings one batch per data rank.

    Raises ValueError for an invalid layout, or one that does not fit the network or the settings.
    """

    kind: ClassVar[str] = "layout"

    model: ModelSpec | BertSpec | UserModel
    size: str = option("custom", "Preset network", label=True)
    layout: str = option(
        "none",
        'Parallel layout, such as "dp2 zero3 tp2" or "pp2 1f1b m8 tp2"; none: one process',
        label=True,
    )
    batch: int = option(
        WorkSpec.batch,
        "Sequences per forward and backward, over all ranks",
        least=1,
        most=1_000_000,
        label=True,
        named_with="context_length",
    )
    accumulation: int = option(
        1,
        "Gradient accumulation: forwards and backwards per optimizer step",
        least=1,
        most=1_000_000,
        label="changed",
    )
    balance: str = option(
        FLOPS,
        "How blocks are divided among pipeline stages: by FLOPs, by time (measured first; "
        "predictions use the hardware file), or for the shortest simulated step",
        choices=(FLOPS, *BY_TIMES),
        label="changed",
    )
    bucket_mb: float = as_in(DataParallelSpec, "bucket_mb")
    reduce_dtype: str = as_in(DataParallelSpec, "reduce_dtype")
    backend: str = as_in(DataParallelSpec, "backend")
    precision: str = as_in(WorkSpec, "precision")
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    checkpointing: str = as_in(WorkSpec, "checkpointing")
    checkpoint_blocks: int = as_in(WorkSpec, "checkpoint_blocks")
    memory_gib: float = as_in(WorkSpec, "memory_gib")
    cuda_graphs: bool = option(
        False,
        "Capture forward and backward in CUDA graphs and replay them: of each pipeline stage, or of "
        "the whole step with a tensor axis",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(5, "Warm-up steps, not timed", least=1, most=100_000)
    steps: int = option(10, "Timed steps", least=1, most=1_000_000)
    device: str = option("cpu", RANKS_DEVICE_HELP)
    seed: int = as_in(DataParallelSpec, "seed")

    phases: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)
        check_budget(self)
        settle_user_model(self)
        check_kernels(self)
        # Equal layouts get the same text, whatever the order of their words.
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
            check_recorded(
                self.parsed_layout,
                self.model,
                device=self.device,
                backend=self.backend,
                accumulation=self.accumulation,
                reduce_dtype=self.reduce_dtype,
            )

    def canonical(self) -> Self:
        """Resets options that have no effect under the layout."""
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
    def parsed_layout(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def ranks(self) -> int:
        return self.parsed_layout.ranks

    @property
    def rank_batch(self) -> int:
        """Sequences per forward and backward on each data rank; 1 (one batch) for a user's model."""
        return max(1, self.batch // self.parsed_layout.data)

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch; without a pipeline, all of a data rank; 1 for a user's model."""
        return max(1, self.rank_batch // self.parsed_layout.microbatches)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulation * self.network.context_length

    def schedule(self) -> Schedule | None:
        """Returns the pipeline's schedule, not lowered; None without a pipeline."""
        return schedule_of(self.parsed_layout) if self.parsed_layout.pipeline > 1 else None

    @property
    def needs_times(self) -> bool:
        """True if `stages` needs the times of the network's parts."""
        return self.parsed_layout.pipeline > 1 and self.balance in BY_TIMES

    def stages(self, times: PartTimes | None = None) -> list[range]:
        """Returns the blocks of each pipeline stage; one stage without a pipeline.

        times  required if needs_times. With balance "step", use cost/pipeline/cuts.py instead.
        """
        assert times is not None or not self.needs_times, "the caller measures or predicts them"
        schedule = self.schedule()
        if schedule is None:
            return [range(self.network.num_layers)]
        assert self.balance != STEP, "cost/pipeline/cuts.py divides those"
        return cut_blocks(self.network, schedule, times)
