"""float8 linear layers of torchao, if it is installed: forward and backward products are float8,
scaled by the largest value of each tensor. The weights keep their type.
"""

import importlib.util

import torch
from torch import nn

from stepgauge.models.fused_linear import FusedLinear

PACKAGE = "torchao"
LEAST_CAPABILITY = (8, 9)  # which torch._scaled_mm needs
MULTIPLE = 16  # torch._scaled_mm needs widths that are multiples of 16


def why_not(device: torch.device) -> str | None:
    """Returns why float8 cannot run on the device, or None."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"float8 needs the package {PACKAGE}, which is not installed"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"float8 products need a GPU's matrix units; {device.type} has none here"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"float8 products need compute capability 8.9; this GPU has {major}.{minor}"
    return None


def is_convertible(part: nn.Module, name: str) -> bool:
    """Returns True for a linear layer of suitable widths that is not the output layer, whose rounding
    errors would go directly into the loss.
    """
    if not isinstance(part, nn.Linear) or name.rpartition(".")[2] == "head":
        return False
    return part.in_features % MULTIPLE == 0 == part.out_features % MULTIPLE


def convert(model: nn.Module) -> None:
    """Converts the model's linear layers to float8 in place. Their weights stay the same objects."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    sections = {
        name: part.sections for name, part in model.named_modules() if isinstance(part, FusedLinear)
    }
    config = Float8LinearConfig(pad_inner_dim=True)  # allows any number of tokens
    convert_to_float8_training(model, module_filter_fn=is_convertible, config=config)
    for name, widths in sections.items():  # torchao's class drops this attribute
        setattr(model.get_submodule(name), "sections", widths)  # noqa: B010 - no field of nn.Module
