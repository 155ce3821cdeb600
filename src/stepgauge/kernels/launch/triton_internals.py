"""All code of this package that depends on the internals of Triton versions.

Why: a launch as Triton documents it, `kernel[grid](...)`, inspects the type and alignment of every
argument, which takes 20 to 60 µs of host time. Many kernels of a real step take less
(triton-lang/triton issue 3619).

What is used, of Triton 3.6 to 3.9: the compiled kernel's launcher, the order of its arguments, and
the attributes of a descriptor that it reads.

The way out: a public launcher of a compiled kernel that takes addresses. Then `Launch` can call it
and this file can be deleted. If these internals change, let every `Launch` use `kernel[grid]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

try:
    from triton import knobs
except ImportError:  # Without Triton the package can be imported, but launches no kernels.
    knobs = None

Launcher = Callable[[tuple[int, int, int], int, tuple[Any, ...]], None]


def hooks_present() -> bool:
    """Returns True if a profiler hooks Triton's launches, which must then go through its JIT."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def launcher_of(compiled: Any) -> Launcher:
    """Returns a function launch(grid, stream, arguments) that takes addresses in place of tensors.

    Loads the binary on the current device. Tensor descriptors are encoded anew at each launch.
    """
    # run takes grid, stream, function, metadata, launch metadata, two hooks (None: no hook), and
    # then all arguments of the signature in order.
    run = compiled.run
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    return lambda grid, stream, arguments: run(*grid, stream, *fixed, *arguments)


class Address(NamedTuple):
    """Stands in for a tensor in a descriptor, without keeping memory alive."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class Descriptor(NamedTuple):
    """The attributes of a TensorDescriptor that Triton's launcher reads."""

    base: Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # read by Triton 3.8
