"""What is shown of each kind of record. To show a new kind in its own way, add a row to KINDS."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from stepgauge.report.answers import (
    broadcast_answer,
    comm_answer,
    data_parallel_answer,
    kernel_answer,
    memory_answer,
    profile_answer,
    step_answer,
    train_answer,
)
from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.comm import comm_blocks, comm_table
from stepgauge.report.data_parallel import plots as data_parallel_plots
from stepgauge.report.dtypes import dtype_table
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.layout import layout_answer, layout_blocks
from stepgauge.report.memory import memory_blocks
from stepgauge.report.ops import op_blocks
from stepgauge.report.page import Block
from stepgauge.report.step_plots import phase_blocks
from stepgauge.report.table import Table
from stepgauge.report.train import train_blocks
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How records of one kind are shown. All functions take the records.

    question        the question of their section
    answer          returns one or two sentences that answer it, from records with figures; "" for none
    blocks          returns the content of the section
    table           returns the table that commands print; takes the requested `statistics`, too
    csv_statistics  those of a CSV file if none are requested
    """

    question: str = "What was measured?"
    answer: Callable[[Sequence[Record]], str] = lambda records: ""
    blocks: Callable[[Sequence[Record]], Sequence[Block]] = lambda records: [record_table(records)]
    table: Callable[..., Table] = record_table
    csv_statistics: Sequence[str] = ("median", "p10", "p90", "mean", "std", "n")


_by_schedule = functools.partial(record_table, first=["schedule"])


def _collectives(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """Returns the fields of nccl-tests, or the statistics if some are requested."""
    if statistics:
        return record_table(records, statistics=statistics, first=["op"])
    return comm_table(records)


KINDS: Mapping[str, Kind] = {
    "step": Kind(
        question="How long does a step take, and which phase takes most of it?",
        answer=step_answer,
        blocks=phase_blocks,
    ),
    "train": Kind(
        question="Does the loss fall, and how many tokens are trained on per second?",
        answer=train_answer,
        blocks=train_blocks,
    ),
    "profile": Kind(
        question="Which kinds of work take the time of a step?",
        answer=profile_answer,
    ),
    "memory": Kind(
        question="What holds memory during a step, and what is the peak?",
        answer=memory_answer,
        blocks=memory_blocks,
    ),
    "comm": Kind(
        question="How fast are the links, and how does time grow with size?",
        answer=comm_answer,
        blocks=comm_blocks,
        table=_collectives,
        csv_statistics=(),  # the fields of nccl-tests
    ),
    "data-parallel": Kind(
        question="How much slower is a step when it runs on several ranks?",
        answer=data_parallel_answer,
        blocks=data_parallel_plots,
    ),
    "layout": Kind(
        question="Which layout trains fastest, and how much time does each of its axes take?",
        answer=layout_answer,
        blocks=layout_blocks,
    ),
    "pipeline": Kind(
        question="How much time does a schedule spend waiting, and how much does each rank hold?",
        table=_by_schedule,
    ),
    "op": Kind(
        question="How fast is the function, and how fast could it be on this device?",
        blocks=lambda records: [block for each in records for block in op_blocks(each)],
    ),
    "broadcast": Kind(
        question="Which way of copying a tensor from the host to every device is the fastest?",
        answer=broadcast_answer,
        blocks=broadcast_blocks,
        table=_by_schedule,
    ),
    "dtypes": Kind(
        blocks=lambda records: [dtype_table(each) for each in records if "dtypes" in each.tables],
    ),
    **dict.fromkeys(
        KERNELS,
        Kind(
            answer=kernel_answer,
            blocks=lambda records: [*kernel_bars(records), kernel_table(records)],
            table=kernel_table,
        ),
    ),
}


def kind_of(name: str) -> Kind:
    """Returns how records of the kind are shown; of one without a row, as any record."""
    return KINDS.get(name, Kind())


def answer(records: Sequence[Record]) -> str:
    """Returns the answer from records of one kind, or "" if none of them has figures."""
    good = [record for record in records if record.status == "ok"]
    if not good:
        return "No row could be measured; the table gives the reasons."
    kind = good[0].kind
    return kind_of(kind).answer([record for record in good if record.kind == kind])
