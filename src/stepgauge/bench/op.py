"""Measures a user's function: checks it against its reference, times it, profiles it, and places it
on the roofline.
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
NO_RESULT = "it returns no tensor and changes no input: there was nothing to check"
CHANGES_INPUTS = "it changes its inputs: they are restored before each call"
WRONG = "wrong: relative error {:.1e} compared with the reference, at most {:.1e} is allowed"
RIGHT_ONCE = "right in its first call, then "
NO_GPU = "0 active drivers"  # Triton's message if it finds no GPU


def run(spec: OpSpec) -> Record:
    """Returns the record of the function. If its result is wrong, the record has status "failed" and
    no time.

    If the function changes its inputs, they are restored before each call, which is not timed. If it
    returns no tensor, the changed inputs are its result.
    Metrics: ms; reference_ms if there is a reference; error; bytes and flops and the figures derived
    from them (gb_per_s, tflop_per_s, intensity in FLOP per byte, attainable_tflop_per_s,
    fraction_of_roofline); the ceilings copy_gb_per_s and matmul_tflop_per_s of the same process.
    Series: [calls, µs] of one call, for each device kernel, or on a CPU for each operator.
    """
    device = torch.device(spec.device)
    user = load(spec.file, spec.function, device)
    initial = user.copied_inputs()
    result = _call(user.call, user, initial, device)
    metrics: dict[str, Sample] = {}
    expected: CallResult | None = None
    changes_inputs, notes = result.changed, [CHANGES_INPUTS] if result.changed else []
    if not user.reference or not result.tensors:
        notes.append(NO_REFERENCE if result.tensors else NO_RESULT)
    else:
        expected = _call(user.reference_call, user, initial, device)
        changes_inputs |= expected.changed
        error, wrong = _check(user, result, expected, spec.tolerance)
        metrics["error"] = Sample.exact(error, "relative")
        if wrong:
            return _record(spec, device, metrics, status="failed", note=wrong)
    restore = functools.partial(user.restore, initial) if changes_inputs else None
    times = _times(user, device, spec.seconds, restore)
    if expected:  # again, because state that the function keeps between calls may now be wrong
        last = _call(user.call, user, initial, device)
        if wrong := _check(user, last, expected, spec.tolerance)[1]:
            return _record(spec, device, metrics, status="failed", note=RIGHT_ONCE + wrong)
    timed = {name: Sample.of(values, "ms") for name, values in times.items()}
    metrics |= timed | _roofline(user, result, times["ms"], device)
    if restore:
        restore()
    launched = launches(user.call, device, restore)
    return _record(spec, device, metrics, note="; ".join(notes), launched=launched)


def _times(
    user: UserFunction, device: torch.device, seconds: float, before: Callable[[], None] | None
) -> Mapping[str, Sequence[float]]:
    """Times the function and its reference in turns and returns ms.

    before  called before each call, and once at the end
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
    """The result of a call.

    tensors  copies of the returned tensors, or of the changed inputs if none were returned
    changed  True if the call changed an input
    """

    tensors: Sequence[torch.Tensor]
    changed: bool


def _call(
    call: Callable[[], Any], user: UserFunction, initial: Any, device: torch.device
) -> CallResult:
    """Makes one call, restores the inputs to `initial` if it changed them, and returns the result.

    Raises ValueError if the function launches a Triton kernel and there is no GPU.
    """
    try:
        result = call()
        devices.synchronize(device)
    except RuntimeError as error:
        if NO_GPU not in str(error):
            raise
        raise ValueError(
            f"the function launches a Triton kernel, which needs a GPU; device is {device} "
            "(TRITON_INTERPRET=1 runs small kernels without a GPU)"
        ) from None
    pairs = zip(tensors_in(user.inputs), tensors_in(initial), strict=True)
    changed = [new for new, old in pairs if not _is_same(new, old)]
    tensors = [tensor.detach().clone() for tensor in tensors_in(result) or changed]
    if changed:
        user.restore(initial)
    return CallResult(tensors, bool(changed))


def _is_same(new: torch.Tensor, old: torch.Tensor) -> bool:
    new, old = _dense(new), _dense(old)
    return bool(((new == old) | ((new != new) & (old != old))).all())  # NaN equals NaN here


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
    user: UserFunction, result: CallResult, expected: CallResult, limit: float
) -> tuple[float, str]:
    """Returns the largest relative error of the result's tensors, and a sentence if it is too large.

    limit  the largest allowed error; 0 for the default of the dtype
    """
    shapes, expected_shapes = (
        [tuple(t.shape) for t in each.tensors] for each in (result, expected)
    )
    if shapes != expected_shapes:
        raise ValueError(
            "the function and its reference return tensors of different shapes: "
            f"{shapes} and {expected_shapes}"
        )
    sides = (side for tensor in tensors_in(user.inputs) for side in tensor.shape)
    longest_sum = max(sides, default=1)
    limit = limit or max(tolerance(tensor.dtype, longest_sum) for tensor in result.tensors)
    pairs = zip(result.tensors, expected.tensors, strict=True)
    error = largest(relative_error(_dense(a), _dense(b)) for a, b in pairs)
    return error, "" if error <= limit else WRONG.format(error, limit)


def _roofline(
    user: UserFunction, result: CallResult, times: Sequence[float], device: torch.device
) -> dict[str, Sample]:
    """Returns the function's rates and its fraction of the roofline.

    attainable rate = min(matmul rate, copy rate x intensity)
    """
    # An input that is changed in place counts twice: it is read and written.
    num_bytes = user.num_bytes or _num_bytes([user.inputs, result.tensors])
    flops = user.num_flops if user.num_flops is not None else _counted_flops(user)
    dtype = next((t.dtype for t in tensors_in(user.inputs) if t.is_floating_point()), torch.float32)
    limits = ceilings(device, dtype)
    copy, matmul = limits.bytes_per_s / 1e9, limits.flop_per_s / 1e12
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
    """Returns the FLOPs of matrix products and attention in the reference, or in the function if it
    has none.
    """
    call: Callable[[], Any] = user.reference_call if user.reference else user.call
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _num_bytes(values: Any) -> int:
    """Returns the bytes of the distinct tensors in `values`."""
    parts = (part for tensor in tensors_in(values) for part in dense_parts(tensor))
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())
