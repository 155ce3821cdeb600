"""Which function measures a spec: the one table that commands and Python callers share."""

import functools
from pathlib import Path
from typing import Any

from stepgauge.bench import broadcast, comm, data_parallel, layout, memory, op, profile, step
from stepgauge.bench.kernels import comparison
from stepgauge.bench.sweep import Job
from stepgauge.spec.broadcast import BroadcastSpec
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.op import OpSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.step import StepSpec


def job_of(spec: Any, folder: Path) -> Job:
    """The job of a spec; what it writes beside its record goes to the run's folder.

    Raises ValueError for what the spec asks together but cannot have, or what is no such spec.
    """
    match spec:
        case ProfileSpec():
            profile.check(spec)
            return Job(functools.partial(profile.run, folder=folder), spec)
        case StepSpec():
            step.check(spec)
            return Job(step.run, spec)
        case MemorySpec():
            memory.check(spec)
            return memory.jobs(spec, folder=folder)[-1]  # the prediction only where that is all
        case DataParallelSpec():
            data_parallel.check(spec)
            return Job(data_parallel.JOB, spec)
        case LayoutSpec():
            layout.check(spec)
            return Job(layout.JOB, spec)
        case KernelSpec():
            comparison.check(spec)
            return Job(comparison.run, spec, process=spec.kind)
        case CommSpec():
            return Job(comm.RUN, spec)
        case BroadcastSpec():
            return broadcast.job(spec)
        case OpSpec():
            return Job(op.run, spec)
    raise ValueError(f"{type(spec).__name__} is no spec that can be measured")
