"""A module that is run before training, to learn something of it, and is afterwards as it was."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def trial(module: nn.Module, given: Iterable[Tensor]) -> Iterator[None]:
    """Its buffers, and the random state of the host and of the devices of what it is given, stay as
    they were: also those that it does not write but replaces, or makes.
    """
    before = {place: (buffer, buffer.clone()) for place, buffer in _buffers(module).items()}
    # a tensor may lie on a GPU that is only imagined
    is_there = torch.cuda.is_available()
    devices = {tensor.get_device() for tensor in given if tensor.is_cuda and is_there}
    with torch.random.fork_rng(sorted(devices)):
        yield
    with torch.no_grad():
        for owner, name in _buffers(module).keys() - before.keys():
            setattr(owner, name, None)
        for (owner, name), (buffer, values) in before.items():
            setattr(owner, name, buffer.copy_(values))


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """By the module that has it, and its name there."""
    return {
        (owner, name): buffer
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
    }
