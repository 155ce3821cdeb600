"""Draws weights by name, so that a stage of a network has the same weights as the whole network."""

import hashlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """False for tensors without memory: on the meta device, or fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@torch.no_grad()
def draw_normal(parameter: Tensor, name: str, *, seed: int | None, std: float) -> None:
    """Fills the parameter with normal values that depend only on the seed and the name.

    seed  None: the seed of the last torch.manual_seed

    Tensors without memory are not changed. Different kinds of devices draw different values.
    """
    if not has_values(parameter):
        return
    text = f"{torch.initial_seed() if seed is None else seed} {name}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest))
    parameter.normal_(std=std, generator=generator)
