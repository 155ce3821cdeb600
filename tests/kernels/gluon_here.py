"""Helpers of the tests of Gluon kernels: compile a launch without a GPU, and examine its machine
code.
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
    """Compiles the launch's kernel without loading it."""
    args = list(tensors)
    for position, view, box in launch.boxes:
        args[position] = launch.describe(args[position], *launching.tma_shape(view), box)
    return launch.kernel.warmup(
        *args, *launch.scalars, grid=launch.grid, **launch.constants, **launch.options
    )


def tool(name):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return path if path.exists() else pytest.skip(f"this Triton has no {name}")


def assert_no_spills_in_a_loop(compiled, folder):
    """Asserts that products are asynchronous and that no loop over them uses the stack."""
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
    assert "wgmma" not in log.stdout + log.stderr  # ptxas warns if it serialises products
    loops = loops_over_tiles(instructions(compiled, folder))
    # one loop per consumer, or two: without a mask and with one
    assert len(loops) in (hopper_ops.CONSUMERS.value, 2 * hopper_ops.CONSUMERS.value)
    assert not [each for loop in loops for each in loop if "LDL" in each or "STL" in each]


def instructions(compiled, folder):
    """Returns [(address, instruction)] of the kernel's machine code."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [tool("cuobjdump"), "-sass", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (int(address, 16), instruction)
        for address, instruction in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    ]


def loops_over_tiles(code):
    """Returns the instructions of each innermost loop that has both products and exponentials.

    A loop ends with a jump back. The waits for barriers, at the end of the code, also jump back
    into the loops. Of overlapping ranges, the shortest is therefore the loop.
    """
    index = {address: i for i, (address, _) in enumerate(code)}
    jumps = [(i, re.search(r"BRA.*?0x([0-9a-f]+)", text)) for i, (_, text) in enumerate(code)]
    ranges = [(index.get(int(jump[1], 16), i), i) for i, jump in jumps if jump]
    loops = []
    for first, last in sorted(ranges, key=lambda loop: loop[1] - loop[0]):
        inside = [text for _, text in code[first : last + 1]]
        does_both = "HGMMA" in "".join(inside) and "".join(inside).count("MUFU.EX2") >= 32
        if does_both and all(last < a or b < first for a, b, _ in loops):
            loops.append((first, last, inside))
    return [inside for _, _, inside in loops]


def exponentials_during_a_product(compiled, folder):
    """Returns how many exponentials a thread computes between each wait that leaves one product in
    flight and the next wait, without the zeros.
    """
    text = "\n".join(instruction for _, instruction in instructions(compiled, folder))
    parts = re.findall(
        r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1(.*?)(?=WARPGROUP\.DEPBAR)", text, re.DOTALL
    )
    return [count for part in parts if (count := part.count("MUFU.EX2"))]
