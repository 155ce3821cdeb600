"""Runs a module before training, to learn something about it, and leaves it as it was."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def trial(module: nn.Module, inputs: Iterable[Tensor]) -> Iterator[None]:
    """Restores the module's buffers and the random state of the host and of the inputs' devices at the
    end of the context. Buffers that the module replaced are put back, and new ones are set to None.
    """
    before = {place: (buffer, buffer.clone()) for place, buffer in _buffers(module).items()}
    # An input may be on a GPU that is only simulated.
    has_gpu = torch.cuda.is_available()
    devices = {tensor.get_device() for tensor in inputs if tensor.is_cuda and has_gpu}
    with torch.random.fork_rng(sorted(devices)):
        yield
    with torch.no_grad():
        for owner, name in _buffers(module).keys() - before.keys():
            setattr(owner, name, None)
        for (owner, name), (buffer, values) in before.items():
            setattr(owner, name, buffer.copy_(values))


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Returns all buffers by the module that has it and its name there."""
    return {
        (owner, name): buffer
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
    }
