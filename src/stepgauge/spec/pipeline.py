"""The spec of `bench pipeline`: network, schedule, ranks, micro-batches and timing."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import RANKS_DEVICE_HELP, as_in, check, option, with_defaults
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.pipeline import SCHEDULES, Schedule, build
from stepgauge.spec.plan.pipeline.lower import AHEAD
from stepgauge.spec.plan.pipeline.schedules import LOOPED, stages_per_rank
from stepgauge.spec.plan.stages import (
    BY_TIMES,
    FLOPS,
    STEP,
    TIME,
    PartTimes,
    cut_parts,
    describe_balance,
    num_blocks,
    num_parts,
    part_flops,
)
from stepgauge.spec.step import WorkSpec

# Schedules of torch.distributed.pipelining, and the name of the same schedule in this package.
TORCH_SCHEDULES: Mapping[str, str] = {
    "torch-gpipe": "gpipe",
    "torch-1f1b": "1f1b",
    "torch-interleaved": "interleaved",
    "torch-izb": "izb",
    "torch-zbv": "zbv",
    "torch-dualpipev": "dualpipev",
}
# Schedules that split backward. Torch's implementations of them refuse compiled modules.
SPLITTING = ("zb-h1", "izb", "zbv", "dualpipev", "v-half", "v-min")
BALANCES = (FLOPS, "count", TIME, STEP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """One row of `bench pipeline`: forward and backward of a batch, without an optimizer.

    The sequence length is the model's context_length.
    """

    kind: ClassVar[str] = "pipeline"
    provenances: ClassVar[tuple[str, ...]] = ("modelled", "measured")  # of its rows

    model: ModelSpec | BertSpec
    size: str = option("custom", "Preset network", label=True)
    schedule: str = option(
        "1f1b",
        "Pipeline schedule; torch-*: the ones of torch.distributed.pipelining",
        choices=(*SCHEDULES, *TORCH_SCHEDULES),
        label=True,
    )
    ranks: int = option(
        2, "Number of processes, each on its own device", least=1, most=1000, label=True
    )
    micro_batches: int = option(
        4,
        "Number of micro-batches",
        least=1,
        most=10_000,
        flag="microbatches",
        label=True,
    )
    per_rank: int = option(
        2, "Stages per rank of interleaved and izb", least=1, most=64, label="changed"
    )
    batch: int = option(
        8,
        "Sequences in the whole batch",
        least=1,
        most=1_000_000,
        label=True,
        named_with="context_length",
    )
    balance: str = option(
        FLOPS,
        "How blocks are divided among stages: by FLOPs, by count, by time (measured first; "
        "predictions use the hardware file), or for the shortest simulated step",
        choices=BALANCES,
        label="changed",
    )
    overweight: int = option(
        0,
        "Extra blocks on the second stage, to unbalance the pipeline",
        least=0,
        most=1000,
        label="changed",
    )
    precision: str = option(
        "fp32",
        "bf16 uses autocast; bf16-pure has bf16 parameters",
        choices=("fp32", "tf32", "bf16", "bf16-pure"),
        label=True,
    )
    compile: str = option(
        "off",
        "torch.compile; blocks: each block",
        choices=("off", "blocks"),
        flag_value="blocks",
        label="changed",
    )
    cuda_graphs: bool = option(
        False,
        "Capture forward and backward of each stage in CUDA graphs and replay them, to save launch "
        "overhead; takes memory for each micro-batch in flight",
        flag_value=True,
        label="changed",
    )
    ahead: int = option(
        AHEAD,
        "How many computations before its tensors are used a receive is posted",
        least=0,
        most=100,
        label="changed",
    )
    transport: str = option(
        "auto",
        "How tensors get to the next stage: copies into peer memory, or messages of the backend",
        choices=("auto", "copies", "messages"),
        label="changed",
    )
    fill: bool = option(
        False,
        "Move weight gradients into the idle gaps of the schedule, using measured stage times",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(3, "Warm-up steps, not timed", least=1, most=100_000)
    steps: int = option(5, "Timed steps", least=1, most=1_000_000)
    device: str = option("cpu", RANKS_DEVICE_HELP)
    seed: int = as_in(WorkSpec, "seed")

    def __post_init__(self) -> None:
        check(self)
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch is {self.batch}, which {self.micro_batches} micro-batches do not divide"
            )
        if self.is_torch and self.ours in SPLITTING and self.compile != "off":
            raise ValueError(f"compile is {self.compile!r}; {self.schedule} supports only off")
        if getattr(self.model, "block", "") == "parallel":
            raise ValueError(
                "block is 'parallel', which a stage boundary cannot split: choose 'pre-norm'"
            )
        if self.cuda_graphs and self.device.startswith("cpu"):
            raise ValueError("cuda_graphs needs a GPU; device is 'cpu'")
        layers = self.model.num_layers
        if self.num_stages > num_parts(layers):
            raise ValueError(
                f"{self.schedule} on {self.ranks} ranks has {self.num_stages} stages; the network has "
                f"{num_parts(layers)} parts (embedding, halves of {layers} blocks, head): choose "
                f"num_layers {num_blocks(self.num_stages)} or fewer ranks"
            )
        self.plan()

    @property
    def parsed_layout(self) -> Layout:
        return Layout(pipeline=self.ranks, schedule=self.ours if self.ranks > 1 else "")

    @property
    def micro_batch(self) -> int:
        return self.batch // self.micro_batches

    @property
    def is_torch(self) -> bool:
        return self.schedule in TORCH_SCHEDULES

    @property
    def ours(self) -> str:
        """This package's schedule of the same name."""
        return TORCH_SCHEDULES.get(self.schedule, self.schedule)

    @property
    def num_stages(self) -> int:
        return self.ranks * stages_per_rank(self.ours, self.per_rank)

    def plan(self) -> Schedule:
        """Returns the schedule, not lowered. Raises ValueError for numbers that it does not support."""
        return build(
            self.ours,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            per_rank=stages_per_rank(self.ours, self.per_rank),
        )

    @property
    def needs_times(self) -> bool:
        """True if `stages` needs the times of the network's parts."""
        return self.balance in BY_TIMES

    def stages(self, times: PartTimes | None = None) -> list[range]:
        """Returns the parts of each stage.

        times  required with balance "time". With balance "step", use cost/pipeline/cuts.py instead.
        """
        assert self.balance != STEP, "cost/pipeline/cuts.py divides those"
        layers = self.model.num_layers
        if self.balance == TIME:
            assert times is not None, "the caller measures or predicts them"
            weights = times.of(layers)
        elif self.balance == "count":
            weights = [0.0, *[1.0] * (2 * layers), 0.0]
        else:
            weights = part_flops(self.model)
        return cut_parts(weights, self.plan(), overweight=self.overweight)

    def describe_stages(self, parts: list[range], times: str) -> str:
        """Returns the note of a row about its stages; `times`: "measured" or "predicted"."""
        return describe_balance(parts, "parts", balance=self.balance, times=times)

    def canonical(self) -> Self:
        """Resets options that have no effect on the schedule."""
        own = dict.fromkeys(("ahead", "transport", "cuda_graphs"), not self.is_torch)
        own["fill"] = not self.is_torch and self.ours in SPLITTING
        return with_defaults(self, {"per_rank": self.ours in LOOPED, **own})
