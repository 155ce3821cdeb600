"""Notes in records of rows where plain PyTorch ran because this package's kernels could not."""

import dataclasses
from collections.abc import Mapping

from stepgauge.spec.calibration import FULL_MASK
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record

# The fields that choose an implementation, and the value that chooses this package's kernel.
OWN_KERNELS: Mapping[str, str] = {
    "norm": "triton",
    "attention": "triton",
    "loss": "fused",
    "optimizer": "fused",
}
NATIVE = "native"  # environment key: requested kernel -> what ran
FALLBACK = "plain PyTorch"


def with_fallbacks(record: Record) -> Record:
    """Returns the record with a note for each requested kernel that fell back to plain PyTorch."""
    reason = _reason_for_fallback(record)
    if reason is None or record.status != "ok" or record.provenance != "measured":
        return record
    kernels = requested_kernels(record)
    if not kernels:
        return record
    ran = {**record.environment.get(NATIVE, {}), **dict.fromkeys(kernels, f"{FALLBACK}: {reason}")}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: ran})


def fallbacks(record: Record) -> list[str]:
    """Returns one sentence per reason for which kernels fell back to plain PyTorch."""
    return [sentence for sentence in what_ran(record) if f" ran in {FALLBACK}" in sentence]


def what_ran(record: Record) -> list[str]:
    """Returns one sentence for each library that ran requested kernels, or for each fallback."""
    kernels_of: dict[str, list[str]] = {}
    for kernel, library in record.environment.get(NATIVE, {}).items():
        if library != "C++":  # older records say so of this package's kernels
            kernels_of.setdefault(library, []).append(kernel)
    return [f"{', '.join(kernels)} ran in {library}" for library, kernels in kernels_of.items()]


def libraries_of(record: Record) -> str:
    """Returns the other packages that ran shapes of a calibrated operation; "" if none did."""
    words = record.spec["operation"].split()
    native = record.environment.get(NATIVE, {}).items()
    ran = [
        (kernel, library) for kernel, library in native if not library.startswith(("C++", FALLBACK))
    ]
    # Of "attention's forward" and "attention's backward" only the one that was timed: backward needs both.
    return " and ".join(
        dict.fromkeys(library for kernel, library in ran if kernel.split()[-1] in words)
    )


def requested_kernels(record: Record) -> list[str]:
    """Returns the kernels of this package that the record's spec requests."""
    if operation := record.spec.get("operation", ""):
        # The record is of a calibration; the operation is such as "attention triton forward".
        operation = operation.replace(FULL_MASK, "")
        kernels = [f"{part} {name}" for part, name in OWN_KERNELS.items()]
        return [kernel for kernel in kernels if operation.startswith(f"{kernel} ")]
    if record.kind in KERNELS:
        return ["ours"]
    chosen = {**record.spec.get("model", {}), **record.spec}
    if chosen.get("phases", "step") != "step":  # no optimizer runs
        chosen.pop("optimizer", None)
    return [f"{part} {name}" for part, name in OWN_KERNELS.items() if chosen.get(part) == name]


def _reason_for_fallback(record: Record) -> str | None:
    if not str(record.spec.get("device", "")).startswith("cuda"):
        return "no CUDA GPU"
    return None if record.environment.get("triton") else "no Triton"
