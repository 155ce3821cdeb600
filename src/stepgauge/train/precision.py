"""The precisions of a training step as data: types of parameters and autocast, TF32, loss scaling,
master weights and float8.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from stepgauge.train import float8

Module = TypeVar("Module", bound=nn.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """How a training step computes. `master_weights` are fp32 copies in the optimizer; `float8`
    converts the matrix products of linear layers.
    """

    parameters: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    scales_loss: bool = False
    master_weights: bool = False
    float8: bool = False

    def of(self, module: Module) -> Module:
        """Converts the module's parameters, and for float8 its layers, and returns it."""
        if self.float8:
            float8.convert(module)
        # Not Module.to, which makes complex parameters real.
        return module.bfloat16() if self.parameters == torch.bfloat16 else module.float()

    def state_bytes(self, optimizer: str) -> int:
        """Returns the least bytes per parameter that an optimizer keeps as its state."""
        if optimizer == "sgd":
            return 0
        # Two moments in the parameters' type, or two moments and the master weight in fp32.
        return 12 if self.master_weights else 2 * self.parameters.itemsize

    def autocasting(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of a forward pass."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    @contextlib.contextmanager
    def matmul_mode(self) -> Iterator[None]:
        """Sets whether fp32 matrix products use TF32, in forward and backward, and restores the
        setting afterwards.
        """
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "tf32": Precision(tf32=True),
    "bf16": Precision(autocast=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16, scales_loss=True),
    "bf16-pure": Precision(parameters=torch.bfloat16),
    # Autocast keeps the loss and the norms in fp32; the weights need no cast.
    "bf16-master": Precision(
        parameters=torch.bfloat16, autocast=torch.bfloat16, master_weights=True
    ),
    "float8": Precision(autocast=torch.bfloat16, float8=True),
}

# The types in which gradients can be reduced; None: the parameters' type.
REDUCE_DTYPES: Mapping[str, torch.dtype | None] = {
    "own": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def unavailable(name: str, device: torch.device) -> str | None:
    """Returns why the precision cannot run on the device, or None."""
    if name == "tf32" and device.type != "cuda":
        return f"tf32 is a mode of CUDA matrix units; {device.type} has none"
    return float8.why_not(device) if name == "float8" else None


def precision_on(name: str, device: torch.device) -> Precision:
    """Returns the precision of that name. Raises ValueError if the device cannot run it."""
    if reason := unavailable(name, device):
        raise ValueError(reason)
    return PRECISIONS[name]
