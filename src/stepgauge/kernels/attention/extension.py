"""Attention launched from C++ (extension.cpp): what it is told of the kernels that Python has
planned and compiled.

In Python a forward and backward cost about 118 µs of host time here, twice that on a GPU's host,
where one head of 4096 needs 69 µs of the GPU. How it is built and done without:
stepgauge.runtime.extension.

A call in Python offers what it has launched; C++ takes the next one of the same shapes, strides and
options, eager or of the custom operators. How float32 products are made may change between two
calls, so C++ looks at each. Copy descriptors are Triton's own with another address in them, which
the driver has a function for; before the first use a moved one is compared with a new one.
"""

import struct
from pathlib import Path

import torch

from stepgauge.kernels.launch import LAUNCH_H, cuda_addresses, cuda_context
from stepgauge.kernels.launch.triton_internals import descriptor_bytes, plain_launch
from stepgauge.runtime.extension import Extension

_FUNCTIONS = (
    "cuLaunchKernel",
    "aoti_torch_get_current_cuda_stream",
    "cuCtxSetCurrent",
    "cuTensorMapReplaceAddress",
)
_CONSTANT, _ADDRESS, _DESCRIPTOR = range(3)
_WORDS = {
    "i1": "<?",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u32": "<I",
    "u64": "<Q",
    "fp32": "<f",
}

NATIVE = Extension(
    "attention",
    Path(__file__).with_name("extension.cpp"),
    lambda module: module.configure(*cuda_addresses(*_FUNCTIONS)),
    headers=[
        LAUNCH_H,
        *(Path(__file__).with_name(name) for name in ("programs.h", "registering.h")),
    ],
)
_offered: set = set()


def offer(key, tensors: tuple, num_tensors: int, scratch: tuple, calls: tuple) -> None:
    """After a call in Python: let C++ take the next one like it, if its kernels are compiled.

    tensors: (q, k, v), or of a backward (q, k, v, do, o). scratch: floats of each temporary; calls:
    (launch, its tensors as (number, offset in floats)), numbered as C++ has them, temporaries after
    the `num_tensors` others.
    """
    if NATIVE.module is None:
        NATIVE.without_module += 1
        return
    kind = (key, len(tensors))
    if kind in _offered or not all(launch.launch for launch, _ in calls):
        return
    if key.device != torch.cuda.current_device():
        return  # The context to register is the current device's.
    _offered.add(kind)
    try:
        address = tensors[0].data_ptr()
        steps = tuple(
            step_of(launch, numbers, NATIVE.module.moved, address) for launch, numbers in calls
        )
        call = tensors, key.is_causal, key.scale, key.precision == "tf32"
        NATIVE.module.register(*call, cuda_context(), num_tensors, scratch, steps)
        NATIVE.kinds += 1
    except Exception as error:  # A Triton that launches otherwise: go on in Python.
        NATIVE.problem = f"{type(error).__name__}: {error}"


def takes(key) -> bool:
    """Whether C++ may launch what Python launched for the key."""
    views = [view for view in (key.q, key.k, key.v, key.o, key.do) if view is not None]
    return (
        key.device is not None
        and key.num_splits is None
        and not key.is_bounded
        and not key.overrides
        and all(view.offset == 0 for view in views)
    )


def step_of(launch, numbers: tuple, moved, address: int) -> tuple:
    """One kernel's launch as C++ takes it. Raises ValueError for a kernel whose arguments are not
    all known here.

    moved(descriptor, address) is the driver's; `address` is one that descriptors can be tried with.
    """
    types = list(launch.binary.src.signature.values())
    values = (*[None] * len(numbers), *launch.tail)
    if len(types) != len(values):
        raise ValueError(f"{len(types)} arguments, {len(values)} expected")
    boxes = {position: (view, box) for position, view, box in launch.boxes}
    parameters = []
    for position, (kind, value) in enumerate(zip(types, values, strict=True)):
        if kind == "constexpr":
            continue
        if position in boxes:
            parameters += _descriptor(launch, position, numbers[position], moved, address)
        elif position < len(numbers) and kind.startswith("*"):
            number, offset = numbers[position]
            parameters.append((_ADDRESS, 0, number, 4 * offset, b""))
        else:
            parameters.append(_constant(kind, value))
    return (*plain_launch(launch.binary), *launch.grid, tuple(parameters))


def _constant(kind: str, value) -> tuple:
    form = _WORDS["u64"] if kind.startswith("*") else _WORDS.get(kind)
    if form is None or value is None:
        raise ValueError(f"an argument of type {kind}")
    word = int.from_bytes(struct.pack(form, value), "little")
    return (_CONSTANT, word, 0, 0, b"")


def _descriptor(launch, position: int, number: tuple, moved, address: int) -> list[tuple]:
    """A descriptor, then the shape and strides that Triton passes with it."""
    first, *rest = launch.described(position, address)
    other = launch.described(position, address + 4096)[0]
    if moved(descriptor_bytes(first), address + 4096) != descriptor_bytes(other):
        raise ValueError(
            "a descriptor with another address is not what Triton makes for that address"
        )
    shape, strides = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return [
        (_DESCRIPTOR, 0, number[0], 0, descriptor_bytes(first)),
        *(_constant("i32", length) for length in shape),
        *(_constant("i64", stride) for stride in strides),
    ]
