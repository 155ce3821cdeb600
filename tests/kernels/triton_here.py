"""Markers and helpers for tests that run Triton on a GPU, in the interpreter (in a separate
process), or only compile ahead of time.
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
compiled_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
interpreted_only = pytest.mark.skipif(
    not INTERPRETED, reason="test_interpreter.py runs it with TRITON_INTERPRET=1"
)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or INTERPRETED,
    reason="the interpreter runs on the CPU" if INTERPRETED else "needs a CUDA GPU",
)


def compile_ahead(kernel, arch, signature, constants, *, aligned, options):
    """Compiles a kernel without a GPU. `signature` has the types of the arguments by name; all
    others are constants.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={
            (i,): constants.get(name) for i, name in enumerate(names) if name not in signature
        },
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources_of(compiled):
    """The registers per thread, and the bytes of its stack, to which registers spill."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(match[1]), "stack": int(match[2])}
