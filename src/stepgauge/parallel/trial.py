"""A module that is run before training, to learn something of it, and is afterwards as it was."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def trial(module: nn.Module, given: Iterable[Tensor]) -> Iterator[None]:
    """Its buffers, and the random state of the host and of the devices of what it is given, stay as
    they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {tensor.get_device() for tensor in given if tensor.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
