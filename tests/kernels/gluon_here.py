"""What the tests of kernels in Gluon share: building a launch without a GPU, and reading what was
built.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "triton.experimental.gluon.language.nvidia.hopper", reason="needs a Triton with Gluon"
)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter runs no Gluon", allow_module_level=True)

from stepgauge.kernels.attention import hopper_ops, launching

H100 = launching.Device(arch=90, num_sms=132, l2_bytes=50 << 20)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


def build(launch, *tensors):
    """The launch's kernel, compiled but not loaded."""
    given = list(tensors)
    for position, view, box in launch.boxes:
        given[position] = launch.describe(given[position], *launching.tma_shape(view), box)
    return launch.kernel.warmup(
        *given, *launch.scalars, grid=launch.grid, **launch.constants, **launch.options
    )


def tool(name):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return path if path.exists() else pytest.skip(f"this Triton carries no {name}")


def assert_no_spills_in_a_loop(compiled, folder):
    """Products are asynchronous, and no loop over them uses the stack."""
    assert compiled.metadata.shared <= 227 * 1024
    (folder / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = [
        tool("ptxas"),
        "-v",
        "--gpu-name=sm_90a",
        folder / "kernel.ptx",
        "-o",
        folder / "kernel.cubin",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "wgmma" not in log.stdout + log.stderr  # it would say that products are serialised
    loops = loops_over_tiles(instructions(compiled, folder))
    # without a mask, and with one
    assert len(loops) in (hopper_ops.CONSUMERS.value, 2 * hopper_ops.CONSUMERS.value)
    assert not [each for loop in loops for each in loop if "LDL" in each or "STL" in each]


def instructions(compiled, folder):
    """[(address, instruction)] of the kernel's machine code."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [tool("cuobjdump"), "-sass", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (int(address, 16), what)
        for address, what in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    ]


def loops_over_tiles(code):
    """The instructions of each innermost loop that multiplies and exponentiates.

    A loop ends with a jump back. The waits for barriers, which stand at the end of the code, jump
    back into the loops: of what overlaps the shortest is the loop.
    """
    index = {address: i for i, (address, _) in enumerate(code)}
    jumps = [(i, re.search(r"BRA.*?0x([0-9a-f]+)", what)) for i, (_, what) in enumerate(code)]
    found = [(index.get(int(jump[1], 16), i), i) for i, jump in jumps if jump]
    loops = []
    for first, last in sorted(found, key=lambda loop: loop[1] - loop[0]):
        inside = [what for _, what in code[first : last + 1]]
        does_both = "HGMMA" in "".join(inside) and "".join(inside).count("MUFU.EX2") >= 32
        if does_both and all(last < a or b < first for a, b, _ in loops):
            loops.append((first, last, inside))
    return [inside for _, _, inside in loops]


def exponentials_beside_a_product(compiled, folder):
    """A thread's, between each wait that leaves one product under way and the next wait; none is
    left out.
    """
    text = "\n".join(what for _, what in instructions(compiled, folder))
    parts = re.findall(
        r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1(.*?)(?=WARPGROUP\.DEPBAR)", text, re.DOTALL
    )
    return [count for part in parts if (count := part.count("MUFU.EX2"))]
