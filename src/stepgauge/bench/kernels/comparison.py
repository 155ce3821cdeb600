"""A KernelSpec measured: every implementation checked against the oracle, then all timed in turns,
one record.
"""

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
# The rate's name, what it counts, and how much work that is.
RATES = {"copy": ("gb_per_s", "GB", 1e9), "matmul": ("tflop_per_s", "TFLOP", 1e12)}


def check(spec: KernelSpec) -> None:
    """Raises ValueError for a peer that is not known, before anything runs."""
    known = OPERATIONS[spec.kind].implementations
    for name in spec.named_peers:
        if name not in known:
            raise ValueError(
                f"peers is {name!r}; {spec.kind} has {', '.join(known)}; auto stands for all"
            )


def run(spec: KernelSpec) -> Record:
    """The record of a row. Rows of one shape that follow one another in a process share inputs,
    oracle and checks.
    """
    check(spec)
    return _comparison_of(spec).measure(spec)


_held: list["ShapeComparison"] = []


def _comparison_of(spec: KernelSpec) -> "ShapeComparison":
    if not (_held and _held[0].takes(spec)):
        _held.clear()  # before the next one takes memory
        torch.compiler.reset()
        devices.reset_peak_memory(torch.device(spec.device))
        _held.append(ShapeComparison(spec))
    return _held[0]


class ShapeComparison:
    """One shape: its inputs, and which providers give a right result there."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.operation = OPERATIONS[spec.kind]
        self.device = torch.device(spec.device)
        self.case = self.operation.case(spec)
        self.providers = [
            Provider(name, self.operation.implementations[name]) for name in self._wanted()
        ]
        limit = tolerance(DTYPES[spec.dtype], self.operation.reduction(spec))
        for provider in self.providers:
            provider.check(spec, self.case, limit)

    def _wanted(self) -> list[str]:
        named = {OURS, *self.spec.named_peers}
        baselines = {
            name for name, each in self.operation.implementations.items() if each.is_baseline
        }
        chosen = named if self.spec.named_peers else baselines
        return [name for name in self.operation.implementations if name in chosen]

    def takes(self, spec: KernelSpec) -> bool:
        """Whether the spec differs in the passes and the time for them at most."""
        if type(spec) is not type(self.spec):
            return False
        return (
            dataclasses.replace(spec, passes=self.spec.passes, seconds=self.spec.seconds)
            == self.spec
        )

    def measure(self, spec: KernelSpec) -> Record:
        """Memory of each, then times in turns. What fails in these passes is not dropped from the
        others.
        """
        providers = {provider.name: dataclasses.replace(provider) for provider in self.providers}
        calls: dict[str, Callable[[], Any]] = {}
        memory: dict[str, Sample] = {}
        for name in [name for name, provider in providers.items() if provider.runs]:
            with providers[name].guarded(self.device):
                calls[name], figures = self._prepare(providers[name].function, spec.passes)
                memory |= {
                    f"{name}_{figure}": Sample.exact(n, "bytes") for figure, n in figures.items()
                }
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
        """What is timed, after a first call, with its bytes beyond inputs and results and those
        held for backward.
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
        named, unit, scale = RATES[self.operation.ceiling]
        work = {name: self.operation.work(spec, name) for name in times}
        metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in times.items()}
        for name, values in times.items():
            metrics[f"{name}_{named}"] = rate(work[name] / scale, values, unit)
        ceiling = self._ceiling()
        metrics[f"{self.operation.ceiling}_{named}"] = Sample.exact(ceiling, f"{unit}/s")
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

    def _ceiling(self) -> float:
        reached = _ceilings(self.device, DTYPES[self.spec.dtype])
        return (
            reached.bytes_per_s / 1e9
            if self.operation.ceiling == "copy"
            else reached.flop_per_s / 1e12
        )


# once a process and type: rows that share the process share them
_ceilings = functools.cache(ceilings)


def _errors(providers: Iterable[Provider]) -> dict[str, Sample]:
    """Those that are numbers: a result with NaN has none, and its outcome says so."""
    known = {provider.name: provider.error for provider in providers if provider.error is not None}
    return {
        f"{name}_error": Sample.exact(e, "relative")
        for name, e in known.items()
        if math.isfinite(e)
    }


def _verdict(providers: Iterable[Provider]) -> tuple[str, str]:
    """The row's status and note: who of those that are there has no time. Ours wrong, or broken,
    fails the row.
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
    return (
        "oom" if any(outcome.startswith("oom") for outcome in outcomes.values()) else "failed"
    ), note


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
