"""float8 by torchao, where it is installed: linear layers whose products are float8, forward and
backward, scaled by the largest value of each tensor. Weights stay as they are.
"""

import importlib.util

import torch
from torch import nn

from stepgauge.models.fused_linear import FusedLinear

PACKAGE = "torchao"
LEAST_CAPABILITY = (8, 9)  # of torch._scaled_mm
WHOLE = 16  # rows and columns come in as many


def why_not(device: torch.device) -> str | None:
    """Why float8 cannot run on the device, or None."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"float8 needs the package {PACKAGE}, which is not installed"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"float8 products need a GPU's matrix units; {device.type} has none here"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"float8 products need compute capability 8.9; this GPU has {major}.{minor}"
    return None


def takes(part: nn.Module, name: str) -> bool:
    """Whether the module is a linear layer that float8 fits: not the output matrix, whose errors are
    the loss's.
    """
    if not isinstance(part, nn.Linear) or name.rpartition(".")[2] == "head":
        return False
    return part.in_features % WHOLE == 0 == part.out_features % WHOLE


def convert(model: nn.Module) -> None:
    """Lets those layers compute in float8. Their weights stay the same parameters."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    sections = {
        name: part.sections for name, part in model.named_modules() if isinstance(part, FusedLinear)
    }
    config = Float8LinearConfig(pad_inner_dim=True)  # any number of tokens
    convert_to_float8_training(model, module_filter_fn=takes, config=config)
    for name, widths in sections.items():  # which torchao's class does not carry
        setattr(model.get_submodule(name), "sections", widths)  # noqa: B010 - no field of nn.Module
