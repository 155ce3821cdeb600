"""A person's own function measured: checked against its reference, timed, profiled, placed on the
roofline.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.bench.user_file import UserFunction, load
from stepgauge.measure import devices
from stepgauge.measure.accuracy import largest, relative_error, tolerance
from stepgauge.measure.ceilings import ceilings
from stepgauge.measure.environment import environment
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.interleaved import time_interleaved
from stepgauge.measure.launches import Launched, launches
from stepgauge.measure.memory.storage_tracker import dense_parts
from stepgauge.spec.op import OpSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.throughput import rate, throughput

NO_REFERENCE = "there is no reference: the result was not checked"
NOTHING_GIVEN = "it gives no tensor and changes no input: there was nothing to check"
CHANGES_INPUTS = "it changes its inputs: they are restored before each call"
WRONG = "wrong: relative error {:.1e} against the reference, at most {:.1e} is right"
RIGHT_ONCE = "right in its first call, then "
NO_GPU = "0 active drivers"  # how Triton says that it found no GPU


def run(spec: OpSpec) -> Record:
    """The record of the function. A wrong result has no time: status failed.

    A function that changes its inputs gets them restored before each call, which is not timed. One
    that gives no tensor is checked by what it changed.
    Metrics: ms; reference_ms where there is a reference; error; bytes and flops and what follows
    from them (gb_per_s, tflop_per_s, intensity in FLOP a byte, attainable_tflop_per_s,
    fraction_of_roofline); the ceilings copy_gb_per_s and matmul_tflop_per_s of the same process.
    Series: for each device kernel (on a CPU each operator) [calls, µs] of one call.
    """
    device = torch.device(spec.device)
    user = load(spec.file, spec.function, device)
    kept = user.copied_inputs()
    found = _outcome(user.call, user, kept, device)
    metrics: dict[str, Sample] = {}
    right: CallResult | None = None
    changed, notes = found.changed, [CHANGES_INPUTS] if found.changed else []
    if not user.reference or not found.given:
        notes.append(NO_REFERENCE if found.given else NOTHING_GIVEN)
    else:
        right = _outcome(user.reference_call, user, kept, device)
        changed |= right.changed
        error, wrong = _check(user, found, right, spec.tolerance)
        metrics["error"] = Sample.exact(error, "relative")
        if wrong:
            return _record(spec, device, metrics, status="failed", note=wrong)
    restore = functools.partial(user.restore, kept) if changed else None
    times = _times(user, device, spec.seconds, restore)
    if right:  # what it keeps between calls may be wrong by now
        last = _outcome(user.call, user, kept, device)
        if wrong := _check(user, last, right, spec.tolerance)[1]:
            return _record(spec, device, metrics, status="failed", note=RIGHT_ONCE + wrong)
    timed = {name: Sample.of(values, "ms") for name, values in times.items()}
    metrics |= timed | _roofline(user, found, times["ms"], device)
    if restore:
        restore()
    launched = launches(user.call, device, restore)
    return _record(spec, device, metrics, note="; ".join(notes), launched=launched)


def _times(
    user: UserFunction, device: torch.device, seconds: float, before: Callable[[], None] | None
) -> Mapping[str, Sequence[float]]:
    """Milliseconds of the function and of its reference in turns, `before` called before each and
    in the end.
    """
    calls = {"ms": user.call} | ({"reference_ms": user.reference_call} if user.reference else {})
    times, failures = time_interleaved(calls, device, seconds=seconds, before=before)
    if failures:
        raise next(iter(failures.values()))
    if before:
        before()
    return times


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What a call left behind: copies of the tensors that it gave, or else of the inputs that it
    changed; and whether it changed any.
    """

    given: Sequence[torch.Tensor]
    changed: bool


def _outcome(
    call: Callable[[], Any], user: UserFunction, kept: Any, device: torch.device
) -> CallResult:
    """Of one call on inputs whose values are those of `kept`, and are again after it. Raises
    ValueError for a Triton kernel where there is no GPU.
    """
    try:
        result = call()
        devices.synchronize(device)
    except RuntimeError as error:
        if NO_GPU not in str(error):
            raise
        raise ValueError(
            f"the function launches a Triton kernel, which needs a GPU; device is {device} "
            "(TRITON_INTERPRET=1 runs small ones without)"
        ) from None
    pairs = zip(tensors_in(user.inputs), tensors_in(kept), strict=True)
    changed = [new for new, old in pairs if not _same(new, old)]
    given = [tensor.detach().clone() for tensor in tensors_in(result) or changed]
    if changed:
        user.restore(kept)
    return CallResult(given, bool(changed))


def _same(new: torch.Tensor, old: torch.Tensor) -> bool:
    new, old = _dense(new), _dense(old)
    return bool(((new == old) | ((new != new) & (old != old))).all())  # NaN is NaN


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _record(
    spec: OpSpec,
    device: torch.device,
    metrics: dict[str, Sample],
    *,
    launched: Sequence[Launched] = (),
    status: str = "ok",
    note: str = "",
) -> Record:
    return Record.of(
        spec,
        metrics=metrics,
        series={each.name: [each.calls, each.us] for each in launched},
        environment=environment(device),
        status=status,
        note=note,
    )


def _check(
    user: UserFunction, ours: CallResult, right: CallResult, asked: float
) -> tuple[float, str]:
    """The largest relative error over the tensors of the result, and a sentence if it is too large."""
    shapes, right_shapes = ([tuple(t.shape) for t in each.given] for each in (ours, right))
    if shapes != right_shapes:
        raise ValueError(
            "the function and its reference give results of other shapes: "
            f"{shapes} and {right_shapes}"
        )
    sides = (side for tensor in tensors_in(user.inputs) for side in tensor.shape)
    longest_sum = max(sides, default=1)
    limit = asked or max(tolerance(tensor.dtype, longest_sum) for tensor in ours.given)
    pairs = zip(ours.given, right.given, strict=True)
    error = largest(relative_error(_dense(a), _dense(b)) for a, b in pairs)
    return error, "" if error <= limit else WRONG.format(error, limit)


def _roofline(
    user: UserFunction, found: CallResult, times: Sequence[float], device: torch.device
) -> dict[str, Sample]:
    """Rates, and how far below the roof: attainable = min(matmul rate, copy rate x intensity)."""
    # what is changed in place is read and written
    num_bytes = user.num_bytes or _num_bytes([user.inputs, found.given])
    flops = user.num_flops if user.num_flops is not None else _counted_flops(user)
    dtype = next((t.dtype for t in tensors_in(user.inputs) if t.is_floating_point()), torch.float32)
    reached = ceilings(device, dtype)
    copy, matmul = reached.bytes_per_s / 1e9, reached.flop_per_s / 1e12
    figures = {
        "bytes": Sample.exact(num_bytes, "bytes"),
        "gb_per_s": rate(num_bytes / 1e9, times, "GB"),
        "copy_gb_per_s": Sample.exact(copy, "GB/s"),
        "matmul_tflop_per_s": Sample.exact(matmul, "TFLOP/s"),
    }
    median = statistics.median(times)
    if not flops:
        return figures | {
            "fraction_of_roofline": Sample.exact(num_bytes / median / 1e6 / copy, "of the roof")
        }
    attainable = matmul
    if num_bytes:
        intensity = flops / num_bytes
        attainable = min(matmul, copy * intensity / 1e3)
        figures["intensity"] = Sample.exact(intensity, "FLOP/byte")
    return figures | {
        "flops": Sample.exact(flops, "FLOP"),
        **throughput(times, flops=flops),
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


def _num_bytes(values: Any) -> int:
    """Of the distinct tensors, each moved once."""
    parts = (part for tensor in tensors_in(values) for part in dense_parts(tensor))
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())
