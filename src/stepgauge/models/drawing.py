"""Weights drawn by name: a part of a network that is built alone has the weights of the whole."""

import hashlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Not one that stands for another: on the meta device, or fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@torch.no_grad()
def draw_normal(parameter: Tensor, name: str, *, seed: int | None, std: float) -> None:
    """Fills the parameter with normal values that follow from the seed and the name alone.

    seed  None: that of the last torch.manual_seed

    Tensors without memory (meta, fake) are left as they are. Devices of different kinds draw
    different values.
    """
    if not has_values(parameter):
        return
    text = f"{torch.initial_seed() if seed is None else seed} {name}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest))
    parameter.normal_(std=std, generator=generator)
