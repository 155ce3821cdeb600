"""Everything here that leans on the inside of one Triton version.

Why: a launch as Triton documents it, `kernel[grid](...)`, looks at every argument's type and
alignment and builds copy descriptors anew, 20 to 60 µs of host time a launch; many kernels of a
real step take less (triton-lang/triton issue 3619).

What is used, of Triton 3.6 to 3.9: the compiled kernel's C launcher and the order of its arguments;
of 3.6 alone: the function that builds a copy descriptor. Where anything looks different, the launch
goes through Triton's own.

The way out: a public launcher of a compiled kernel that takes addresses. Then this file goes, and
`Launch` calls that. Without it: let every `Launch` take `kernel[grid]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import triton
    from triton import knobs
except ImportError:  # The package imports without Triton; nothing is launched there.
    triton = knobs = None
try:
    from triton.backends.nvidia import driver as nvidia_driver
except ImportError:  # a Triton without the NVIDIA backend
    nvidia_driver = None

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


def launcher_under_descriptors(compiled: Any) -> tuple[Launcher, dict[int, Any]] | None:
    """The launcher that takes descriptors ready-made, and what `descriptor` needs of each argument.

    Triton builds a descriptor, about 3 µs of host time, for every such argument of every launch, in
    a Python function around the compiled launcher; this takes that one out. None if it does not
    look as in Triton 3.6.
    """
    run = compiled.run
    launch = getattr(run, "launch", None)
    code = getattr(launch, "__code__", None)
    if (
        code is None
        or not triton.__version__.startswith("3.6.")
        or not hasattr(nvidia_driver, "make_tensordesc_arg")
    ):
        return None
    cells = (cell.cell_contents for cell in launch.__closure__ or ())
    inside = dict(zip(code.co_freevars, cells, strict=True))
    if (
        set(inside) != {"launcher", "tensordesc_indices", "tensordesc_meta"}
        or None in inside["tensordesc_meta"]
    ):
        return None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return None
    metas = dict(zip(sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"], strict=True))
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    fixed = (*fixed, compiled.packed_metadata, None, None, None)
    launcher = inside["launcher"]
    return lambda grid, stream, flat: launcher(*grid, stream, *fixed, *flat), metas


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


def expanded(descriptor: Descriptor, meta: Any) -> list[Any]:
    """The driver's descriptor, then its shape and strides: what the launcher underneath takes."""
    return nvidia_driver.make_tensordesc_arg(descriptor, meta)
