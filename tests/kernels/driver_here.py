"""The driver's functions as a test gives them to C++: ctypes types, and whether C++ can be built."""

import ctypes
import shutil
import sysconfig
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++"))
    or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C++ compiler and Python.h",
)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, *[ctypes.c_uint] * 7, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)


def addresses(functions):
    return [ctypes.cast(function, ctypes.c_void_p).value for function in functions]


class Driver:
    """What every test's driver does: one stream, contexts that are remembered, and `statuses` for
    the next launches.
    """

    def __init__(self):
        self.launches, self.statuses, self.contexts = [], [], []
        self.functions = LAUNCH(self.launch), STREAM(self.stream), CONTEXT(self.set_context)

    def stream(self, device, out):
        out[0] = 1234
        return 0

    def set_context(self, context):
        self.contexts.append(context)
        return 0

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        raise NotImplementedError
