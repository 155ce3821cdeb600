"""Where plain PyTorch computed in place of this package's kernels: the row says so."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.spec.calibration import FULL_MASK
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record

# The fields that choose an implementation, and the value of each that stands for ours.
OURS: Mapping[str, str] = {
    "norm": "triton",
    "attention": "triton",
    "loss": "fused",
    "optimizer": "fused",
}
NATIVE = "native"  # of an environment: what ran, by what was asked for
FALLBACK = "plain PyTorch"


def with_fallbacks(record: Record) -> Record:
    """The record, saying for each of our kernels that could not run what ran instead."""
    reason = _reason(record)
    if reason is None or record.status != "ok" or record.provenance != "measured":
        return record
    asked = ours_asked(record)
    if not asked:
        return record
    ran = {**record.environment.get(NATIVE, {}), **dict.fromkeys(asked, f"{FALLBACK}: {reason}")}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: ran})


def fallbacks(record: Record) -> list[str]:
    """One sentence a reason for which plain PyTorch ran in place of kernels of ours."""
    return [_ran(names, path) for path, names in _by_path(record) if path.startswith(FALLBACK)]


def what_ran(record: Record) -> list[str]:
    """One sentence for what ran the kernels that were asked for: a library, or plain PyTorch and
    why.
    """
    return [_ran(names, path) for path, names in _by_path(record)]


def _by_path(record: Record) -> Iterable[tuple[str, list[str]]]:
    """What ran, and for which names. Older records say "C++" of our own kernels."""
    by_path: dict[str, list[str]] = {}
    for name, path in record.environment.get(NATIVE, {}).items():
        if path != "C++":
            by_path.setdefault(path, []).append(name)
    return by_path.items()


def _ran(names: Sequence[str], path: str) -> str:
    return f"{', '.join(names)} ran in {path}"


def ours_asked(record: Record) -> list[str]:
    """The kernels of this package that the record's spec asks for."""
    if operation := record.spec.get(
        "operation", ""
    ):  # of a calibration: "attention triton forward"
        names = [f"{part} {name}" for part, name in OURS.items()]
        plain = operation.replace(FULL_MASK, "")
        return [name for name in names if plain.startswith(f"{name} ")]
    return ["ours"] if record.kind in KERNELS else _parts(record.spec)


def _reason(record: Record) -> str | None:
    if not str(record.spec.get("device", "")).startswith("cuda"):
        return "no CUDA GPU"
    return None if record.environment.get("triton") else "no Triton"


def _parts(spec: Mapping[str, Any]) -> list[str]:
    chosen = {**spec.get("model", {}), **spec}
    if chosen.get("phases", "step") != "step":  # no optimizer runs
        chosen.pop("optimizer", None)
    return [f"{part} {name}" for part, name in OURS.items() if chosen.get(part) == name]
