"""A pipeline parallel step as it is asked for: network, schedule, ranks, micro-batches, and how it
is timed.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import as_in, check, option, with_defaults
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
    part_flops,
)
from stepgauge.spec.step import WorkSpec

# torch.distributed.pipelining's own schedules, and ours of the same name.
OF_TORCH: Mapping[str, str] = {
    "torch-gpipe": "gpipe",
    "torch-1f1b": "1f1b",
    "torch-interleaved": "interleaved",
    "torch-izb": "izb",
    "torch-zbv": "zbv",
    "torch-dualpipev": "dualpipev",
}
# Those that split backward; torch's refuse compiled modules.
SPLITTING = ("zb-h1", "izb", "zbv", "dualpipev", "v-half", "v-min")
BALANCES = (FLOPS, "count", TIME, STEP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What `bench pipeline` runs for one row: forward and backward of a batch, no optimizer. The
    sequence length is the model's context_length.
    """

    kind: ClassVar[str] = "pipeline"
    provenances: ClassVar[tuple[str, ...]] = ("modelled", "measured")  # of the rows that it has

    model: ModelSpec | BertSpec
    size: str = option("custom", "preset that the model spec starts from", label=True)
    schedule: str = option(
        "1f1b",
        "the order of each rank's work; torch-: torch.distributed.pipelining's own",
        choices=(*SCHEDULES, *OF_TORCH),
        label=True,
    )
    ranks: int = option(
        2, "processes, each with a device of its own", least=1, most=1000, label=True
    )
    micro_batches: int = option(
        4,
        "parts of the batch that are on their way one after another",
        least=1,
        most=10_000,
        flag="microbatches",
        label=True,
    )
    per_rank: int = option(
        2, "stages a rank of interleaved schedules", least=1, most=64, label="changed"
    )
    batch: int = option(
        8, "sequences in all", least=1, most=1_000_000, label=True, named_with="context_length"
    )
    balance: str = option(
        FLOPS,
        "how blocks are cut into stages: by their FLOPs and the head's, by their count, by time, "
        "measured before the row (predictions: the hardware file's), or for the shortest step that "
        "is simulated with such times",
        choices=BALANCES,
        label="changed",
    )
    overweight: int = option(
        0,
        "blocks that the second stage has more than its share",
        least=0,
        most=1000,
        label="changed",
    )
    precision: str = option(
        "fp32",
        "bf16 is autocast; bf16-pure has bf16 parameters",
        choices=("fp32", "tf32", "bf16", "bf16-pure"),
        label=True,
    )
    compile: str = option(
        "off",
        "torch.compile of each block",
        choices=("off", "blocks"),
        flag_value="blocks",
        label="changed",
    )
    cuda_graphs: bool = option(
        False,
        "record forward and backward of each stage once as CUDA graphs, and replay them: for stages "
        "that the host is too slow for; takes memory for each micro-batch in flight",
        flag_value=True,
        label="changed",
    )
    ahead: int = option(
        AHEAD,
        "computations between the posting of a receive and its reader",
        least=0,
        most=100,
        label="changed",
    )
    transport: str = option(
        "auto",
        "of tensors between stages: copies into the other ranks' memory, or messages of the backend",
        choices=("auto", "copies", "messages"),
        label="changed",
    )
    fill: bool = option(
        False,
        "place each W anew in the gaps that the stages' own times leave, found before the row",
        flag_value=True,
        label="changed",
    )
    warmup: int = option(3, "untimed steps first", least=1, most=100_000)
    steps: int = option(5, "timed steps", least=1, most=1_000_000)
    device: str = option("cpu", "cpu or cuda: each rank takes the GPU of its own number")
    seed: int = as_in(WorkSpec, "seed")

    def __post_init__(self) -> None:
        check(self)
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch is {self.batch}; {self.micro_batches} micro-batches must divide it"
            )
        if self.is_torchs and self.ours in SPLITTING and self.compile != "off":
            raise ValueError(f"compile is {self.compile!r}; {self.schedule} takes 'off' only")
        if getattr(self.model, "block", "") == "parallel":
            raise ValueError("block is 'parallel', which no stage has half of; choose 'pre-norm'")
        if self.cuda_graphs and self.device.startswith("cpu"):
            raise ValueError("cuda_graphs needs a GPU; device is 'cpu'")
        if self.num_stages > self.model.num_layers:
            raise ValueError(
                f"{self.schedule} on {self.ranks} ranks has {self.num_stages} stages; "
                f"the network has {self.model.num_layers} blocks"
            )
        self.plan()

    @property
    def parsed_layout(self) -> Layout:
        return Layout(pipeline=self.ranks, schedule=self.ours if self.ranks > 1 else "")

    @property
    def micro_batch(self) -> int:
        return self.batch // self.micro_batches

    @property
    def is_torchs(self) -> bool:
        return self.schedule in OF_TORCH

    @property
    def ours(self) -> str:
        """Our schedule of the same name."""
        return OF_TORCH.get(self.schedule, self.schedule)

    @property
    def num_stages(self) -> int:
        return self.ranks * stages_per_rank(self.ours, self.per_rank)

    def plan(self) -> Schedule:
        """The schedule, not lowered. Raises ValueError for numbers that it does not do."""
        return build(
            self.ours,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            per_rank=stages_per_rank(self.ours, self.per_rank),
        )

    @property
    def needs_times(self) -> bool:
        """Whether stages are cut by what parts take, measured or predicted."""
        return self.balance in BY_TIMES

    def stages(self, times: PartTimes | None = None) -> list[range]:
        """The parts of each stage; `times` for a spec balanced by time. cost/pipeline/cuts.py has
        those of one balanced by the step.
        """
        assert self.balance != STEP, "whoever simulates cuts"
        layers = self.model.num_layers
        if self.balance == TIME:
            assert times is not None, "whoever runs or predicts the spec has them"
            weights = times.of(layers)
        elif self.balance == "count":
            weights = [0.0, *[1.0] * (2 * layers), 0.0]
        else:
            weights = part_flops(self.model)
        return cut_parts(weights, self.plan(), overweight=self.overweight)

    def describe_stages(self, parts: list[range], times: str) -> str:
        """For the note of a row whose `times` of parts are measured or predicted."""
        return describe_balance(parts, "parts", balance=self.balance, times=times)

    def canonical(self) -> Self:
        """With defaults for the options that the schedule does not look at."""
        own = dict.fromkeys(("ahead", "transport", "cuda_graphs"), not self.is_torchs)
        own["fill"] = not self.is_torchs and self.ours in SPLITTING
        return with_defaults(self, {"per_rank": self.ours in LOOPED, **own})
