"""What experiments on single operations share: rows of a grid on this machine, and published
figures beside ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.bench.kernels import OPERATIONS, comparison
from stepgauge.bench.sweep import Job
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.table import Table
from stepgauge.report.views import plotted
from stepgauge.spec.grids import Point
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.published import SOURCES

SECONDS = 0.05  # of timing for each implementation: a grid has many rows


def kernel_jobs(machine: Machine, kind: str, points: Iterable[Point]) -> list[Job]:
    """One row a point, all of an operation in one process."""
    spec = OPERATIONS[kind].spec
    rows = [spec(**{"seconds": SECONDS, **point, "device": machine.device}) for point in points]
    return [Job(comparison.run, row, process=kind) for row in rows]


def needs_gpu(machine: Machine) -> str | None:
    """Elsewhere plain PyTorch runs in place of our kernels, which measures nothing of them."""
    return None if machine.is_gpu else "our kernels run on CUDA GPUs only"


def kernel_experiment(kind: str, points: Iterable[Point], **told: Any) -> Experiment:
    """An operation beside its peers; `told` is what the experiment says of itself."""
    return Experiment(
        jobs=lambda machine, folder: kernel_jobs(machine, kind, points),
        blocks=lambda records: [*kernel_bars(records), kernel_table(records)],
        needs=needs_gpu,
        **told,
    )


def beside_published(
    records: Sequence[Record], source: str, figures: Mapping[Any, Mapping[str, float]]
) -> Table:
    """Published ms by (name, value) pairs of the spec, each beside ours; hardware differs."""
    rows = []
    for wanted, published in figures.items():
        same = [r for r in records if all(r.spec.get(name) == value for name, value in wanted)]
        for name, theirs in published.items():
            here = plotted(same[0], f"{name}_ms") if same else None
            rows.append([" ".join(f"{k}={v}" for k, v in wanted), name, here, float(theirs)])
    head = ["row", "implementation", "here ms", "published ms"]
    caption = f"Beside {source}: {SOURCES[source]}."
    return Table(
        head,
        rows,
        numeric=frozenset(head[2:]),
        caption=caption,
        folded=not any(here for *_, here, _ in rows),
    )
