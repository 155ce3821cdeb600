"""An implementation in a comparison, and its outcome: an error in it ends no other."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from stepgauge.bench.kernels.operation import Case, Implementation
from stepgauge.measure import devices

# How torch says that a backend of its attention does not take the device, type or shape.
_NOT_OFFERED = ("No viable backend", "No available kernel")


@dataclasses.dataclass
class Provider:
    """`outcome` is "ok", or why it has no time: "absent: ...", "wrong: ...", "oom: ...", "failed:
    ...".
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
        """Makes the function and holds its result against the oracle."""
        with self.guarded(torch.device(spec.device)):
            self.function = self.implementation.make(spec)
            judge = self.implementation.error or (lambda case, function: case.error(function))
            self.error = judge(case, self.function)
            if not self.error <= limit:
                self.outcome = f"wrong: error {self.error:.1e}, at most {limit:.1e} is right"

    @contextlib.contextmanager
    def guarded(self, device: torch.device) -> Iterator[None]:
        """What it raises within is its outcome, and not the end of the others."""
        try:
            with self.implementation.around():
                yield
                devices.synchronize(device)
        except Exception as error:
            self.drop(error)
        if not self.runs:
            devices.reset_peak_memory(device)

    def drop(self, error: BaseException) -> None:
        said = " ".join(str(error).split())[:200]
        if isinstance(error, ImportError):
            self.outcome = f"absent: {said}"
        elif said.startswith(_NOT_OFFERED):
            self.outcome = "absent: it does not take this device, type or shape"
        elif reason := devices.out_of_memory_reason(error):
            self.outcome = f"oom: {reason}"
        else:
            self.outcome = f"failed: {type(error).__name__}: {said}"
