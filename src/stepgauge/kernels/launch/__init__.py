"""Launching a Triton kernel without the JIT's argument processing.

``kernel[grid](...)`` looks at every argument on every call: type, alignment, options, then a
string key into the cache. At the sizes that a real step uses this costs several times what the
kernel does. A ``Launch`` does it once: it keeps the compiled kernel for arguments known to be of
one kind and, on a call, only hands addresses to the driver.
"""

from typing import Any

import torch

from .triton_internals import hooks_present, launcher_of

__all__ = ["ALIGNMENT_BYTES", "Launch", "hooks_present", "raw_stream"]

ALIGNMENT_BYTES = 16
# JIT options that are not the kernel's own arguments.
_OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Launch:
    """One compiled specialisation of a kernel: pointers aligned to 16 bytes, constants fixed.

    The kernel's signature must have its run-time arguments first and its constants last, and its
    integers must not be specialised (``do_not_specialize``), so that no value of theirs needs
    another compilation.
    """

    __slots__ = ("_launch", "_tail", "constants", "kernel", "options")

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel = kernel
        self.options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
        self.constants = constants
        self._launch: Any = None

    def compile(self, *args: Any) -> Any:
        """Compile for arguments like these: tensors (aligned), numbers or None, in order."""
        compiled = self.kernel.warmup(*args, grid=(1,), **self.constants, **self.options)
        self._launch = launcher_of(compiled)
        names = [p.name for p in self.kernel.params if p.is_constexpr]
        self._tail = tuple(self.constants[name] for name in names)
        return compiled

    @property
    def compiled(self) -> bool:
        return self._launch is not None

    def __call__(self, grid: tuple[int, int], tensors: tuple, scalars: tuple) -> None:
        """Launch on tensors of one device, the first not None: by address where that is safe."""
        like = tensors[0]
        if not like.is_cuda:  # Triton's interpreter
            self._by_triton(grid, tensors, scalars)
            return
        index = like.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, tensors, scalars)
            return
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        combined = 0
        for address in addresses:
            combined |= address
        if combined % ALIGNMENT_BYTES or hooks_present():
            self._by_triton(grid, tensors, scalars)
            return
        if not self.compiled:
            self.compile(*tensors, *scalars)
        self._launch((*grid, 1), raw_stream(index), (*addresses, *scalars, *self._tail))

    def _by_triton(self, grid: tuple[int, int], tensors: tuple, scalars: tuple) -> None:
        """As Triton's documentation does: any alignment, hooks, the interpreter."""
        self.kernel[(*grid, 1)](*tensors, *scalars, **self.constants, **self.options)


def raw_stream(device_index: int) -> int:
    # torch.cuda.current_stream makes an object of it first, which costs as much as the launch. The
    # way out: a public function that gives the handle.
    return torch._C._cuda_getCurrentRawStream(device_index)
