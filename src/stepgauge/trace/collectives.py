"""Finds the collectives of a trace, with their size and group if the trace has them."""

import re
from collections import defaultdict
from collections.abc import Iterable

from stepgauge.spec.analysis import CollectiveRow
from stepgauge.spec.comm import OPS
from stepgauge.trace.attribution import Work
from stepgauge.trace.names import repeated

_DTYPE_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
# Patterns of the names that traces and kernels use for the collectives of `OPS`.
_NAMES = {
    "all_reduce": r"all_?reduce|cross_device_reduce|(one|two)_?shot",
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send_recv": r"send_?recv|^(send|recv)\b",
    "reduce": r"(^|_)reduce(_|$)",
    "gather": r"^gather",
    "scatter": r"^scatter",
    "barrier": r"barrier",
}


def collectives(works: Iterable[Work]) -> list[CollectiveRow]:
    """Returns a row for all calls with the same arguments and range, the longest first."""
    calls: dict[tuple[str, str, str, int, str, int], list[list[float]]] = defaultdict(list)
    for work in works:
        if work.kind == "communication":
            calls[_key(work)].append([work.start, work.us])
    names = ("name", "range", "ranks", "group_size", "dtype", "bytes")
    rows = [
        CollectiveRow(**dict(zip(names, key, strict=True)), calls_us=sorted(times))  # type: ignore[arg-type]
        for key, times in calls.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def _key(work: Work) -> tuple[str, str, str, int, str, int]:
    call, range_ = work.collective, repeated(work.range)
    if call is None:
        return _op_name(work.name), range_, "", 0, "", 0
    # nccl-tests counts the size of the whole operation: the larger of a rank's input and output.
    num_bytes = max(call.num_in, call.num_out) * _DTYPE_BYTES.get(call.dtype, 0)
    name = _op_name(call.name)
    if name == "send_recv" and "to_all" in call.name.replace("alltoall", "all_to_all"):
        name = "all_to_all"
    return name, range_, call.group, call.group_size, call.dtype, num_bytes


def _op_name(name: str) -> str:
    """Returns the collective's name in `OPS`, or the kernel's name if it is none of them."""
    for op, pattern in _NAMES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return op
    return name


def bus_bytes_per_s(row: CollectiveRow, us: float) -> float:
    """Returns the bus bandwidth as nccl-tests defines it; 0 if size or group is unknown."""
    if not row.bytes or row.group_size < 2 or row.name not in OPS or us <= 0:
        return 0.0
    return row.bytes * OPS[row.name].factor(row.group_size) / us * 1e6
