"""The precisions a step can run in, as data: parameter type, autocast type, matmul mode, loss
scaling, master weights, float8.
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
    parameters: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    scales_loss: bool = False
    master_weights: bool = False  # in fp32, in the optimizer
    float8: bool = False  # products of linear layers

    def of(self, module: Module) -> Module:
        """The module with parameters of this precision, and layers where it has its own."""
        if self.float8:
            float8.convert(module)
        # Not Module.to, which makes complex parameters real.
        return module.bfloat16() if self.parameters == torch.bfloat16 else module.float()

    def state_bytes(self, optimizer: str) -> int:
        """Bytes a parameter that an optimizer of that name keeps at least."""
        if optimizer == "sgd":
            return 0
        # two moments, or in fp32 two moments and the master
        return 12 if self.master_weights else 2 * self.parameters.itemsize

    def autocasting(self, device: torch.device) -> torch.autocast:
        """The context in which a forward pass runs."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    @contextlib.contextmanager
    def matmul_mode(self) -> Iterator[None]:
        """fp32 matrix products as this precision wants them, in forward and backward; restored
        afterwards.
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
    # autocast casts no weight here; it keeps the loss and the norms in fp32
    "bf16-master": Precision(
        parameters=torch.bfloat16, autocast=torch.bfloat16, master_weights=True
    ),
    "float8": Precision(autocast=torch.bfloat16, float8=True),
}


# What gradients can be averaged in, by name; None: the parameters' type.
REDUCE_DTYPES: Mapping[str, torch.dtype | None] = {
    "own": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def unavailable(name: str, device: torch.device) -> str | None:
    """Why the precision cannot run on the device, or None."""
    if name == "tf32" and device.type != "cuda":
        return f"tf32 is a mode of CUDA matrix units; {device.type} has none"
    return float8.why_not(device) if name == "float8" else None


def precision_on(name: str, device: torch.device) -> Precision:
    """The precision of that name. Raises ValueError where the device cannot run it."""
    if reason := unavailable(name, device):
        raise ValueError(reason)
    return PRECISIONS[name]
