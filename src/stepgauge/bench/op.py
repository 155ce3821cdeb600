"""A person's own function measured: checked against its reference, timed, profiled, placed on the
roofline.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.bench.user_file import UserFunction, load
from stepgauge.measure import devices
from stepgauge.measure.accuracy import largest, relative_error, tolerance
from stepgauge.measure.ceilings import ceilings
from stepgauge.measure.environment import environment
from stepgauge.measure.interleaved import time_alternately
from stepgauge.measure.launches import Launched, launches
from stepgauge.spec.op import OpSpec
from stepgauge.spec.record import Record, Sample


def run(spec: OpSpec) -> Record:
    """The record of the function. A wrong result has no time: status failed.

    Metrics: ms; reference_ms where there is a reference; error; bytes and flops and what follows
    from them (gb_per_s, tflop_per_s, intensity in FLOP a byte, attainable_tflop_per_s,
    fraction_of_roofline); the ceilings copy_gb_per_s and matmul_tflop_per_s of the same process.
    Series: for each device kernel (on a CPU each operator) [calls, µs] of one call.
    """
    device = torch.device(spec.device)
    user = load(spec.file, spec.function, device)
    result = user.call()
    devices.synchronize(device)
    metrics: dict[str, Sample] = {}
    note = "" if user.reference else "there is no reference: the result was not checked"
    if user.reference:
        error, limit = _check(user, result, spec.tolerance)
        metrics["error"] = Sample.exact(error, "relative")
        if not error <= limit:
            wrong = f"wrong: relative error {error:.1e} against the reference, at most {limit:.1e} is right"
            return _record(spec, device, metrics, status="failed", note=wrong)
    calls = {"ms": user.call} | ({"reference_ms": user.reference_call} if user.reference else {})
    times, failures = time_alternately(calls, device, seconds=spec.seconds)
    for failure in failures.values():
        raise failure
    metrics |= {name: Sample.of(values, "ms") for name, values in times.items()}
    metrics |= _roofline(user, result, times["ms"], device)
    launched = launches(user.call, device)
    return _record(spec, device, metrics, note=note, launched=launched)


def _record(
    spec: OpSpec,
    device: torch.device,
    metrics: dict[str, Sample],
    *,
    launched: Sequence[Launched] = (),
    status: str = "ok",
    note: str = "",
) -> Record:
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        series={each.name: [each.calls, each.us] for each in launched},
        environment=environment(device),
        status=status,
        note=note,
    )


def _check(user: UserFunction, result: Any, asked: float) -> tuple[float, float]:
    """The largest relative error over the tensors of the result, and what is right."""
    ours, theirs = _tensors(result), _tensors(user.reference_call())
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = " and ".join(str([tuple(t.shape) for t in side]) for side in (ours, theirs))
        raise ValueError(f"the function and its reference give results of other shapes: {shapes}")
    if not ours:
        raise ValueError("the function gives no tensor, so that there is nothing to check")
    longest_sum = max((side for t in _tensors(user.inputs) for side in t.shape), default=1)
    limit = asked or max(tolerance(t.dtype, longest_sum) for t in ours)
    return largest(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)), limit


def _roofline(
    user: UserFunction, result: Any, times: Sequence[float], device: torch.device
) -> dict[str, Sample]:
    """Rates, and how far below the roof: attainable = min(matmul rate, copy rate x intensity)."""
    num_bytes = user.num_bytes or _num_bytes([user.inputs, result])
    flops = user.num_flops if user.num_flops is not None else _counted_flops(user)
    dtype = next((t.dtype for t in _tensors(user.inputs) if t.is_floating_point()), torch.float32)
    reached = ceilings(device, dtype)
    copy, matmul = reached.bytes_per_s / 1e9, reached.flop_per_s / 1e12
    figures = {
        "bytes": Sample.exact(num_bytes, "bytes"),
        "gb_per_s": Sample.of((num_bytes / ms / 1e6 for ms in times), "GB/s"),
        "copy_gb_per_s": Sample.exact(copy, "GB/s"),
        "matmul_tflop_per_s": Sample.exact(matmul, "TFLOP/s"),
    }
    median = statistics.median(times)
    if not flops:
        return figures | {
            "fraction_of_roofline": Sample.exact(num_bytes / median / 1e6 / copy, "of the roof")
        }
    intensity = flops / num_bytes
    attainable = min(matmul, copy * intensity / 1e3)
    return figures | {
        "flops": Sample.exact(flops, "FLOP"),
        "tflop_per_s": Sample.of((flops / ms / 1e9 for ms in times), "TFLOP/s"),
        "intensity": Sample.exact(intensity, "FLOP/byte"),
        "attainable_tflop_per_s": Sample.exact(attainable, "TFLOP/s"),
        "fraction_of_roofline": Sample.exact(flops / median / 1e9 / attainable, "of the roof"),
    }


def _counted_flops(user: UserFunction) -> int:
    """FLOPs of the matrix products and attention in the reference, or in the function where there
    is none.
    """
    call: Callable[[], Any] = user.reference_call if user.reference else user.call
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _num_bytes(values: Any) -> int:
    """Of the distinct tensors, each moved once."""
    return sum({t.data_ptr(): t.nbytes for t in _tensors(values)}.values())
