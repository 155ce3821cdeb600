"""The sum of parts: the kernel against a sum in float64."""

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
)

from stepgauge.kernels.part_sum import part_sum  # noqa: E402

# Largest relative error (of norms): that of one rounding to the type, with a margin.
TOLERANCE = {
    torch.float64: 1e-15,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3,
}
SHAPES = [(2, 3, 5), (4, 192, 8), (3, 1), (4, 2500), (1, 17), (2, 0, 4)]  # N parts, and a part's


def check(shape, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(shape, generator=generator).to(device, dtype)
    # a rank's own part: rows of a tensor with the rows of all ranks
    rows = torch.randn(3, *shape[1:], generator=generator).to(device, dtype)
    for rank in range(shape[0]):
        own = rows[1]
        exact = torch.cat([parts[:rank], own[None], parts[rank + 1 :]]).double().sum(0)
        given = parts.clone()
        given[rank] = float("nan")  # does not count
        found = part_sum(given, own, rank)
        assert found.dtype == dtype and found.shape == exact.shape
        assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_kernel(shape, dtype):
    check(shape, dtype)


@needs_triton
@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_interp_kernel_equals_float64(shape, dtype, interpreter, poisoned):
    check(shape, dtype)


@needs_triton
@compiled_only
def test_the_kernel_loads_16_bytes_at_once():
    from stepgauge.kernels.part_sum.triton import BLOCK, NUM_WARPS, part_sum_kernel

    pointers = ("parts_ptr", "own_ptr", "out_ptr")
    counts = ("vectors", "rank")
    compiled = compile_ahead(
        part_sum_kernel,
        90,
        {**dict.fromkeys(pointers, "*bf16"), **dict.fromkeys(counts, "i32")},
        {"NUM_PARTS": 4, "VECTOR": 8, "BLOCK": BLOCK},
        aligned=pointers,
        options={"num_warps": NUM_WARPS},
    )
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line]
    assert loads and all(".v4.b32" in line for line in loads)
    assert resources_of(compiled)["stack"] == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [*SHAPES, (4, 1, 2048, 4096)])
def test_gpu_kernel_equals_float64(shape, dtype):
    check(shape, dtype, "cuda")
