"""Launching a Triton kernel without the JIT's argument processing.

On every call ``kernel[grid](...)`` inspects the type and alignment of every argument and the
options, and builds a string key for its cache. At the sizes of a real step this takes several times
as long as the kernel. A ``Launch`` does it once: it keeps the compiled kernel for one kind of
arguments, and on a call it only passes addresses to the driver.
"""

from typing import Any

import torch

from .triton_internals import hooks_present, launcher_of

__all__ = ["ALIGNMENT_BYTES", "Launch", "hooks_present", "raw_stream"]

ALIGNMENT_BYTES = 16
# Options of the JIT, in contrast to the kernel's own constants.
_OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Launch:
    """One compiled specialisation of a kernel, with fixed constants and pointers aligned to 16
    bytes.

    The kernel's signature must have its run-time arguments first and its constants last. Its
    integers must not be specialised (``do_not_specialize``), so that no value needs another
    compilation.
    """

    __slots__ = ("_launch", "_tail", "constants", "kernel", "options")

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel = kernel
        self.options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
        self.constants = constants
        self._launch: Any = None

    def compile(self, *args: Any) -> Any:
        """Compiles for arguments like these: aligned tensors, numbers or None, in order."""
        compiled = self.kernel.warmup(*args, grid=(1,), **self.constants, **self.options)
        self._launch = launcher_of(compiled)
        names = [p.name for p in self.kernel.params if p.is_constexpr]
        self._tail = tuple(self.constants[name] for name in names)
        return compiled

    @property
    def compiled(self) -> bool:
        return self._launch is not None

    def __call__(self, grid: tuple[int, int], tensors: tuple, scalars: tuple) -> None:
        """Launches the kernel on tensors of one device, by address if that is safe. The first
        tensor must not be None.
        """
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
        columns, rows = grid
        self._launch((columns, rows, 1), raw_stream(index), (*addresses, *scalars, *self._tail))

    def _by_triton(self, grid: tuple[int, int], tensors: tuple, scalars: tuple) -> None:
        """Launches through Triton's JIT, which supports any alignment, hooks and the
        interpreter.
        """
        columns, rows = grid
        self.kernel[columns, rows, 1](*tensors, *scalars, **self.constants, **self.options)


def raw_stream(device_index: int) -> int:
    """Returns the handle of the device's current stream."""
    # torch.cuda.current_stream creates an object around it, which costs as much as the launch. The
    # way out: a public function that returns the handle.
    return torch._C._cuda_getCurrentRawStream(device_index)
