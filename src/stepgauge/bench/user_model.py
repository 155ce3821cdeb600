"""A person's own model, named as FILE.py:factory, as a training step that every measurement takes.

The factory returns a module and its batch: `module(*batch)` gives the loss, or a tensor whose mean
stands in for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stepgauge.bench.load_file import load_file
from stepgauge.models.parts import build_optimizer
from stepgauge.train.precision import PRECISIONS, unavailable
from stepgauge.train.step import TrainingStep

LEARNING_RATE = 1e-4
Factory = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def load_factory(where: str) -> Factory:
    """The function `factory` of FILE.py:factory. Raises ValueError if the file or the function is
    not there.
    """
    file, _, name = where.rpartition(":")
    path = Path(file)
    if not name or path.suffix != ".py":
        raise ValueError(f"model is {where!r}; name it as FILE.py:factory")
    if not path.is_file():
        raise ValueError(f"model is {where!r}, but there is no file {path}")
    module = load_file(path)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise ValueError(
            f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        )
    return factory


def build_own(
    where: str,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    device: torch.device,
    seed: int = 0,
) -> tuple[TrainingStep, tuple[Any, ...]]:
    """The step of the model at FILE.py:factory and its batch, on the device.

    Raises ValueError for a factory that gives something else, and for a precision that the device
    does not have.
    """
    if reason := unavailable(precision, device):
        raise ValueError(reason)
    factory = load_factory(where)
    torch.manual_seed(seed)
    with device:
        made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{where} returned {type(made).__name__}; it must return (module, batch)")
    module, batch = made
    if not isinstance(batch, (tuple, list)):
        raise ValueError(
            f"{where} returned a batch of type {type(batch).__name__}; module(*batch) needs a tuple"
        )
    module = module.to(device=device, dtype=PRECISIONS[precision].parameters)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), tuple(batch))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"{where} gives a module without trainable parameters")
    own = TrainingStep(
        module,
        build_optimizer(optimizer, trained, lr=LEARNING_RATE),
        PRECISIONS[precision],
        device,
        compute_loss=lambda *given: scalar_loss(module(*given)),
    )
    return own, batch


def scalar_loss(output: Any) -> Tensor:
    """The loss in what a module returned: itself, `.loss`, or the mean of its first floating-point
    tensor.
    """
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        output = found
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        raise ValueError(
            f"the model returned {type(output).__name__}, without a floating-point tensor"
        )
    return floating[0] if floating[0].ndim == 0 else floating[0].float().mean()
