"""Launching a Triton kernel without the JIT's argument processing.

``kernel[grid](...)`` looks at every argument on every call: type, alignment, options, then a
string key into the cache. At the sizes that a real step uses this costs several times what the
kernel does. A ``Launch`` does it once: it keeps the compiled kernel for arguments known to be of
one kind and, on a call, only hands addresses to the driver.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

try:
    import triton
    from triton import knobs
except ImportError:  # The package imports without Triton; nobody makes a Launch there.
    triton = knobs = None

ALIGNMENT_BYTES = 16
LAUNCH_H = Path(__file__).with_name("launch.h")  # the same from C++
# JIT options that are not the kernel's own arguments.
_OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Launch:
    """One compiled specialisation of a kernel: pointers aligned to 16 bytes, constants fixed.

    The kernel's signature must have its run-time arguments first and its constants last, and its
    integers must not be specialised (``do_not_specialize``), so that no value of theirs needs
    another compilation.
    """

    __slots__ = (
        "_function",
        "_metadata",
        "_run",
        "_tail",
        "binary",
        "constants",
        "kernel",
        "options",
    )

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel = kernel
        self.options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
        self.constants = constants
        self._run: Any = None
        self.binary: Any = None

    def compile(self, *args: Any) -> Any:
        """Compile for arguments like these: tensors (aligned), numbers or None, in order."""
        compiled = self.kernel.warmup(*args, grid=(1,), **self.constants, **self.options)
        # Reading `run` loads the binary on the current device and builds the C launcher.
        self._run, self._function, self.binary = compiled.run, compiled.function, compiled
        self._metadata = compiled.packed_metadata
        names = [p.name for p in self.kernel.params if p.is_constexpr]
        self._tail = tuple(self.constants[name] for name in names)
        return compiled

    @property
    def compiled(self) -> bool:
        return self._run is not None

    def direct(self, grid_x: int, grid_y: int, stream: int, *args: Any) -> None:
        """Launch with addresses (Python integers) for tensors; the caller vouches for them."""
        # The launcher of Triton 3.6 to 3.9 takes: grid, stream, function, packed metadata, launch
        # metadata, two hooks (None: none), then every argument of the signature in order.
        self._run(
            grid_x, grid_y, 1, stream, self._function, self._metadata, None, None, None,
            *args, *self._tail,
        )  # fmt: skip

    def through_jit(self, grid_x: int, grid_y: int, *args: Any) -> None:
        """Launch as Triton's documentation does: any alignment, hooks, the interpreter."""
        self.kernel[(grid_x, grid_y, 1)](*args, **self.constants, **self.options)


def hooks_present() -> bool:
    """Whether a profiler hooks Triton's launches; they must then go through the JIT."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def raw_stream(device_index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device_index)


def plain_launch(compiled: Any) -> tuple[int, int, int]:
    """(function, threads, bytes of shared memory); ValueError for what a plain launch cannot
    express.
    """
    data = compiled.metadata
    plain = (
        getattr(data, "num_ctas", 1) == 1
        and not getattr(data, "launch_pdl", False)
        and not getattr(data, "launch_cooperative_grid", False)
        and not getattr(data, "global_scratch_size", 0)
        and not getattr(data, "profile_scratch_size", 0)
    )
    if not plain:
        raise ValueError(f"needs more than a plain launch: {data}")
    return compiled.function, 32 * data.num_warps, data.shared


def cuda_addresses(*names: str) -> tuple[int, ...]:
    """The addresses of functions of the CUDA driver or of libtorch_cuda."""
    libraries = {
        True: ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")),
        False: ctypes.CDLL("libcuda.so.1"),
    }
    functions = (getattr(libraries[name.startswith("aoti_")], name) for name in names)
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def cuda_context() -> int:
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0
