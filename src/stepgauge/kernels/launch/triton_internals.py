"""Everything here that leans on the inside of one Triton version.

Why: a launch as Triton documents it, `kernel[grid](...)`, looks at every argument's type and
alignment, 20 to 60 µs of host time a launch; many kernels of a real step take less
(triton-lang/triton issue 3619).

What is used, of Triton 3.6 to 3.9: the compiled kernel's launcher, the order of its arguments, and
what it reads of a descriptor.

The way out: a public launcher of a compiled kernel that takes addresses. Then this file goes, and
`Launch` calls that. Without it: let every `Launch` take `kernel[grid]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

try:
    from triton import knobs
except ImportError:  # The package imports without Triton; nothing is launched there.
    knobs = None

Launcher = Callable[[tuple[int, int, int], int, tuple[Any, ...]], None]


def hooks_present() -> bool:
    """Whether a profiler hooks Triton's launches; they must then go through Triton's launcher."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def launcher_of(compiled: Any) -> Launcher:
    """launch(grid, stream, arguments), addresses for tensors; descriptors are made at each launch.

    Loads the binary on the current device.
    """
    # It takes: grid, stream, function, metadata, launch metadata, two hooks (None: none), then every
    # argument of the signature in order.
    run = compiled.run
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    return lambda grid, stream, arguments: run(*grid, stream, *fixed, *arguments)


class Address(NamedTuple):
    """As much of a tensor as a descriptor asks for; keeps no memory alive."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class Descriptor(NamedTuple):
    """What Triton's launcher reads of a TensorDescriptor."""

    base: Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # Triton 3.8 asks for it
