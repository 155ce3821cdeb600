"""RMSNorm's eager path in C++ (extension.cpp): built in the background on first use, else done without.

In Python an autograd function and three launches cost about 140 µs of host time a step; the GPU
needs 30 µs at 2048 x 2560. ``call`` is the C++ function once it is there, None before; it returns
None for whatever it leaves to Python. The first CUDA call starts a thread that builds it, or loads
it from the cache: nothing waits for that. Without a C++ compiler, or with
``STEPGAUGE_NORM_EXTENSION=0``, ``call`` stays None and ``problem`` says why.

The compiler is called directly and its result moved into place in one step, where
torch.utils.cpp_extension would leave a lock behind if the process ended during the build.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("extension.cpp")
_NAME = "stepgauge_rms_norm"
_OPT_OUT = "STEPGAUGE_NORM_EXTENSION"
# Whether the installed torch's rms_norm is float32 under CUDA autocast (2.12 on) or keeps x's type. A constant, so
# that torch.compile need not trace the question.
BUILTIN_AUTOCAST_IS_FLOAT32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
# What the kernels' run-time arguments must be, in Triton's terms, for C++ to pass them.
_FORWARD_SCALARS, _BACKWARD_SCALARS = ["i32", "fp32"], ["i32"]

call = None
problem: str | None = "nothing has asked for it yet"
_module = None
_registered: dict = {}
_loading = threading.Lock()


def load() -> bool:
    """Build or load the extension now, for the GPU; return whether it serves."""
    global call, problem, _module
    with _loading:
        try:
            if os.environ.get(_OPT_OUT) == "0":
                raise RuntimeError(f"{_OPT_OUT}=0")
            if call is None:
                module = import_module(build())
                module.configure(*_cuda_addresses(), BUILTIN_AUTOCAST_IS_FLOAT32)
                _module, call, problem = module, module.rms_norm, None
        except Exception as error:  # Whatever it is, Python does the same work.
            problem = f"{type(error).__name__}: {error}"
    return call is not None


@functools.cache
def load_in_background() -> threading.Thread:
    thread = threading.Thread(target=load, name="stepgauge-rms-norm-build", daemon=True)
    thread.start()
    return thread


def offer(plan_for, x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor) -> None:
    """After a call in Python: let C++ take the next one like it, as far as kernels are compiled."""
    global problem
    if _module is None:
        load_in_background()
        return
    plan = plan_for(x, weight, y.dtype, residual is not None)
    has_backward = plan.backward.compiled and plan.reduce.compiled
    if not plan.forward.compiled or _registered.get(plan) in (has_backward, True):
        return
    if x.get_device() != torch.cuda.current_device():
        return  # The context to register is the current device's.
    _registered[plan] = has_backward
    try:
        _register(x, residual, weight, y, plan, has_backward)
    except Exception as error:  # A Triton that keeps its binaries otherwise: go on in Python.
        _registered[plan], problem = True, f"{type(error).__name__}: {error}"


def _register(x, residual, weight, y, plan, has_backward: bool) -> None:
    extra = residual is not None
    forward = _handle(plan.forward, 6 if extra else 4, _FORWARD_SCALARS)
    backward = None
    if has_backward:
        main = _handle(plan.backward, 7 if extra else 6, _BACKWARD_SCALARS)
        last = _handle(plan.reduce, 2, _BACKWARD_SCALARS)
        backward = (main, plan.bwd.rows, plan.max_programs, plan.splits, last, plan.reduce_grid)
    _module.register(x, weight, y, extra, _cuda_context(), (*forward, plan.fwd.rows), backward)


def _handle(launch, num_pointers: int, scalars: list[str]) -> tuple[int, int, int]:
    """(function, threads, bytes of shared memory); ValueError for what a plain launch cannot express."""
    compiled = launch.binary
    data = compiled.metadata
    plain = (
        getattr(data, "num_ctas", 1) == 1
        and not getattr(data, "launch_pdl", False)
        and not getattr(data, "launch_cooperative_grid", False)
        and not getattr(data, "global_scratch_size", 0)
        and not getattr(data, "profile_scratch_size", 0)
    )
    types = [t for t in compiled.src.signature.values() if t != "constexpr"]
    expected = all(t.startswith("*") for t in types[:num_pointers]) and types[num_pointers:] == scalars
    if not plain or not expected:
        raise ValueError(f"{launch.kernel.__name__} needs more than a plain launch: {types}, {data}")
    return compiled.function, 32 * data.num_warps, data.shared


@functools.cache
def build() -> Path:
    """Return the shared library, compiled if the cache has none for this source and this torch."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler")
    root = Path(torch.__file__).parent
    flags = ["-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    told = [*flags, torch.__version__, str(root), sys.version, compiler]
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(told).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgauge"
    target = cache / f"{_NAME}-{digest}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / target.name
            command = [compiler, *flags, *(f"-isystem{i}" for i in includes), str(SOURCE), "-o", str(made), *libraries]
            for standard in ("c++20", "c++17"):  # What torch's headers want has changed between versions.
                done = subprocess.run([*command, f"-std={standard}"], capture_output=True, text=True)
                if done.returncode == 0:
                    break
            else:
                raise RuntimeError(f"{compiler} failed: {done.stderr[:500]}")
            made.replace(target)
    return target


def import_module(path: Path):
    loader = ExtensionFileLoader(_NAME, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(_NAME, loader))
    loader.exec_module(module)
    return module


def _cuda_addresses() -> tuple[int, int, int]:
    driver = ctypes.CDLL("libcuda.so.1")
    torch_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cuda.so"))
    functions = driver.cuLaunchKernel, torch_cuda.aoti_torch_get_current_cuda_stream, driver.cuCtxSetCurrent
    return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in functions)


def _cuda_context() -> int:
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0
