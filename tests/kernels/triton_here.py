"""How tests meet Triton: on a GPU, interpreted (in a process of its own), compiled ahead of time,
or not at all.
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
    """The compiled kernel, without a GPU. signature: types of the arguments by name; the others are
    constants.
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
    """Registers of a thread, and the bytes of its stack: what registers spilled to."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this triton carries no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2])}
