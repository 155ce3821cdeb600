"""Runs one implementation of a comparison. Its errors become its outcome and do not stop the others."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from stepgauge.bench.kernels.operation import Case, Implementation
from stepgauge.measure import devices

# torch's messages if a backend of its attention does not support the device, dtype or shape.
_UNSUPPORTED = ("No viable backend", "No available kernel")


@dataclasses.dataclass
class Provider:
    """An implementation with its function and outcome.

    error    relative error of its result; None before it was checked
    outcome  "ok", or the reason for having no time: "absent: ...", "wrong: ...", "oom: ...",
             "failed: ..."
    """

    name: str
    implementation: Implementation
    function: Any = None
    error: float | None = None
    outcome: str = "ok"

    @property
    def runs(self) -> bool:
        return self.outcome == "ok"

    def check(self, spec: Any, case: Case, limit: float) -> None:
        """Makes the function and compares its result with the oracle."""
        with self.guarded(torch.device(spec.device)):
            self.function = self.implementation.make(spec)
            if own_error := self.implementation.error:
                self.error = own_error(case, self.function)
            else:
                self.error = case.error(self.function)
            if not self.error <= limit:  # also true for NaN
                self.outcome = f"wrong: error {self.error:.1e}, at most {limit:.1e} is right"

    @contextlib.contextmanager
    def guarded(self, device: torch.device) -> Iterator[None]:
        """Runs the block in the implementation's context; an exception becomes its outcome."""
        try:
            with self.implementation.around():
                yield
                devices.synchronize(device)
        except Exception as error:
            self.drop(error)
        if not self.runs:
            devices.reset_peak_memory(device)

    def drop(self, error: BaseException) -> None:
        """Sets the outcome for an exception that the implementation raised."""
        message = " ".join(str(error).split())[:200]
        if isinstance(error, ImportError):
            self.outcome = f"absent: {message}"
        elif message.startswith(_UNSUPPORTED):
            self.outcome = "absent: it does not take this device, type or shape"
        elif reason := devices.out_of_memory_reason(error):
            self.outcome = f"oom: {reason}"
        else:
            self.outcome = f"failed: {type(error).__name__}: {message}"
