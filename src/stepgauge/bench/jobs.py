"""Maps each kind of spec to the functions that check and measure it. Commands, the study and the
Python API all use this table.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepgauge.bench import (
    broadcast,
    comm,
    data_parallel,
    dtypes,
    layout,
    memory,
    op,
    pipeline,
    profile,
    step,
)
from stepgauge.bench.kernels import comparison
from stepgauge.bench.ranks import require_ranks
from stepgauge.bench.sweep import Job
from stepgauge.spec.broadcast import BroadcastSpec
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.dtypes import AccumulationSpec, DtypesSpec
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.op import OpSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.step import StepSpec, WorkSpec


def check(spec: Any) -> None:
    """Raises ValueError if the spec's values cannot be combined; builds nothing."""
    match spec:
        case MemorySpec():
            memory.check(spec)
        case PipelineSpec():
            pipeline.check(spec)
        case DataParallelSpec() | LayoutSpec():
            require_ranks(spec)
        case KernelSpec():
            comparison.check(spec)
        case WorkSpec():
            step.check(spec)


def jobs_of(spec: Any, folder: Path) -> list[Job]:
    """Returns the jobs that measure a spec, preceded by the jobs that predict it, if there are any.

    folder  for the files that jobs write next to their records

    Raises ValueError if no job measures this kind of spec.
    """
    match spec:
        case ProfileSpec():
            return [Job(functools.partial(profile.run, folder=folder), spec)]
        case StepSpec():
            return [Job(step.run, spec)]
        case MemorySpec():
            return memory.jobs(spec, folder=folder)
        case DtypesSpec():
            return [Job(dtypes.run, spec)]
        case AccumulationSpec():
            return [Job(dtypes.run_accumulation, spec)]
        case DataParallelSpec():
            return [Job(data_parallel.ON_RANKS, spec)]
        case LayoutSpec():
            return [Job(layout.ON_RANKS, spec)]
        case PipelineSpec():
            return pipeline.jobs(spec)
        case KernelSpec():
            return [Job(comparison.run, spec, process=spec.kind)]
        case CommSpec():
            return [Job(comm.ON_RANKS, spec)]
        case BroadcastSpec():
            return [broadcast.job(spec)]
        case OpSpec():
            return [Job(op.run, spec)]
    raise ValueError(f"{type(spec).__name__} is not a spec that can be measured")


def checked_jobs(specs: Iterable[Any], folder: Path) -> list[Job]:
    """Checks all specs and returns their jobs. Raises ValueError as `check` and `jobs_of` do."""
    jobs = []
    for spec in specs:
        check(spec)
        jobs += jobs_of(spec, folder)
    return jobs
