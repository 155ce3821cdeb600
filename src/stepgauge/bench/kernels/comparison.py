"""Measures a KernelSpec: checks every implementation against the oracle, times them in turns, and
returns one record.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgauge.bench.kernels import OPERATIONS
from stepgauge.bench.kernels.operation import DTYPES
from stepgauge.bench.kernels.provider import Provider
from stepgauge.measure import devices
from stepgauge.measure.accuracy import tolerance
from stepgauge.measure.ceilings import ceilings
from stepgauge.measure.environment import environment
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.interleaved import time_interleaved
from stepgauge.spec.kernel import OURS, KernelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.throughput import rate

PEER_PACKAGES = ("liger-kernel", "quack-kernels", "flash-attn-4", "nvidia-cutlass-dsl")
# By ceiling: the rate's metric, its unit, and the work in one unit.
RATES = {"copy": ("gb_per_s", "GB", 1e9), "matmul": ("tflop_per_s", "TFLOP", 1e12)}


def check(spec: KernelSpec) -> None:
    """Raises ValueError if a named peer is unknown; runs nothing."""
    known = OPERATIONS[spec.kind].implementations
    for name in spec.named_peers:
        if name not in known:
            raise ValueError(
                f"peers is {name!r}; {spec.kind} has {', '.join(known)}; auto stands for all"
            )


def run(spec: KernelSpec) -> Record:
    """Returns the record of a row. Consecutive rows of one shape in one process share inputs, oracle
    and checks.
    """
    check(spec)
    if not (_latest and _latest[0].fits(spec)):
        _latest.clear()  # frees its memory before the next one allocates
        torch.compiler.reset()
        devices.reset_peak_memory(torch.device(spec.device))
        _latest.append(ShapeComparison(spec))
    return _latest[0].measure(spec)


_latest: list["ShapeComparison"] = []  # the comparison of the latest row, or none


class ShapeComparison:
    """The inputs of one shape, and the implementations, checked on these inputs."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.operation = OPERATIONS[spec.kind]
        self.device = torch.device(spec.device)
        self.case = self.operation.case(spec)
        chosen = {OURS, *spec.named_peers}
        self.providers = [
            Provider(name, each)
            for name, each in self.operation.implementations.items()
            if (name in chosen if spec.named_peers else each.is_baseline)
        ]
        limit = tolerance(DTYPES[spec.dtype], self.operation.reduction(spec))
        for provider in self.providers:
            provider.check(spec, self.case, limit)

    def fits(self, spec: KernelSpec) -> bool:
        """True if the spec is this one except for passes and seconds."""
        if type(spec) is not type(self.spec):
            return False
        same = dataclasses.replace(spec, passes=self.spec.passes, seconds=self.spec.seconds)
        return same == self.spec

    def measure(self, spec: KernelSpec) -> Record:
        """Measures the memory of each implementation, then times all in turns.

        An implementation that fails in these passes still runs in a row with other passes.
        """
        providers = {provider.name: dataclasses.replace(provider) for provider in self.providers}
        calls: dict[str, Callable[[], Any]] = {}
        memory: dict[str, Sample] = {}
        for name in [name for name, provider in providers.items() if provider.runs]:
            with providers[name].guarded(self.device):
                calls[name], figures = self._prepare(providers[name].function, spec.passes)
                for figure, nbytes in figures.items():
                    memory[f"{name}_{figure}"] = Sample.exact(nbytes, "bytes")
        around = {name: providers[name].implementation.around for name in calls}
        times, failures = time_interleaved(calls, self.device, seconds=spec.seconds, around=around)
        for name, error in failures.items():
            providers[name].drop(error)
        timed = {name: values for name, values in times.items() if providers[name].runs}
        metrics = self._speeds(spec, timed) | memory | _errors(providers.values())
        status, note = _verdict(providers.values())
        return Record.of(
            spec,
            metrics=metrics,
            status=status,
            note=note,
            environment={
                **environment(self.device),
                "peers": _versions(PEER_PACKAGES),
                "outcomes": {name: provider.outcome for name, provider in providers.items()},
            },
        )

    def _prepare(self, function: Any, passes: str) -> tuple[Callable[[], Any], dict[str, int]]:
        """Calls the function once and returns the timed call, with its bytes: those allocated in
        addition to inputs and results, and those held for backward.
        """
        if self.device.type != "cuda":
            call = self.case.call(function, passes)
            call()
            return call, {}
        devices.reset_peak_memory(self.device)
        empty = torch.cuda.memory_allocated(self.device)
        call = self.case.call(function, passes)
        held = torch.cuda.memory_allocated(self.device) - empty
        call()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        results = sum(tensor.nbytes for tensor in tensors_in(call()))
        extra = torch.cuda.max_memory_allocated(self.device) - before - results
        return call, {"extra_bytes": max(0, extra)} | (
            {"held_bytes": held} if passes == "backward" else {}
        )

    def _speeds(self, spec: KernelSpec, times: Mapping[str, list[float]]) -> dict[str, Sample]:
        rate_name, unit, scale = RATES[self.operation.ceiling]
        work = {name: self.operation.work(spec, name) for name in times}
        metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in times.items()}
        for name, values in times.items():
            metrics[f"{name}_{rate_name}"] = rate(work[name] / scale, values, unit)
        limits = _ceilings(self.device, DTYPES[spec.dtype])
        is_copy = self.operation.ceiling == "copy"
        ceiling = (limits.bytes_per_s if is_copy else limits.flop_per_s) / scale
        metrics[f"{self.operation.ceiling}_{rate_name}"] = Sample.exact(ceiling, f"{unit}/s")
        if OURS in times:
            ours = statistics.median(times[OURS])
            metrics["fraction_of_ceiling"] = Sample.exact(
                work[OURS] / ours * 1e3 / scale / ceiling, "of the ceiling"
            )
            implementations = self.operation.implementations
            peers = [
                values
                for name, values in times.items()
                if name != OURS and implementations[name].is_baseline
            ]
            if peers:
                best = min(map(statistics.median, peers))
                metrics["ratio_to_best_peer"] = Sample.exact(best / ours, "times as fast")
        return metrics


# Measured once per process and dtype, for all rows that share the process.
_ceilings = functools.cache(ceilings)


def _errors(providers: Iterable[Provider]) -> dict[str, Sample]:
    """Returns the finite errors as metrics. A NaN is left out; the outcome reports it."""
    return {
        f"{provider.name}_error": Sample.exact(provider.error, "relative")
        for provider in providers
        if provider.error is not None and math.isfinite(provider.error)
    }


def _verdict(providers: Iterable[Provider]) -> tuple[str, str]:
    """Returns the row's status and a note on implementations without a time. The row fails if ours
    is wrong or fails.
    """
    outcomes = {
        provider.name: provider.outcome
        for provider in providers
        if not provider.outcome.startswith("absent")
    }
    note = "; ".join(f"{name} {outcome}" for name, outcome in outcomes.items() if outcome != "ok")
    if outcomes.get(OURS, "").startswith(("wrong", "failed")):
        return "failed", note
    if "ok" in outcomes.values():
        return "ok", note
    is_oom = any(outcome.startswith("oom") for outcome in outcomes.values())
    return "oom" if is_oom else "failed", note


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of the installed packages."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
