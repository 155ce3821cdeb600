"""Rotary positions: the oracle against autograd, the kernel against the oracle, and a compiled
attention layer that goes through it.
"""

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

from stepgauge.kernels import rotary as package  # noqa: E402
from stepgauge.kernels.rotary import reference, rotary_backward, rotated_heads  # noqa: E402
from stepgauge.models.rotary import rotary_tables  # noqa: E402
from stepgauge.models.transformer import Attention  # noqa: E402
from stepgauge.spec.model import ModelSpec  # noqa: E402

# Largest relative error (of norms) from float64: that of one rounding to the type, with a margin.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# batch, tokens, heads of queries, of keys, width, rotated features
SHAPES = [(2, 37, 3, 3, 16, 16), (1, 40, 4, 2, 24, 12), (2, 1, 2, 1, 10, 10), (1, 33, 2, 2, 8, 2)]


def inputs(shape, dtype, device="cpu", tables=None):
    """Returns gradients with heads before tokens in memory, as from attention, and tables."""
    batch, tokens, heads, kv_heads, width, turned = shape
    generator = torch.Generator().manual_seed(0)

    def gradient(num_heads):
        of_heads = torch.randn(batch, num_heads, tokens, width, generator=generator)
        return of_heads.to(device, dtype).transpose(1, 2)

    parts = [gradient(n) for n in (heads, kv_heads, kv_heads)]
    angle = torch.rand(tokens, turned // 2, generator=generator) * 6.3
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    return *parts, *(each.to(device, tables or dtype) for each in (cos, sin))


def exact_gradient(dq, dk, dv, cos, sin):
    heads = [each.shape[2] for each in (dq, dk, dv)]
    given = [each.detach().double().cpu() for each in (dq, dk, dv, cos, sin)]
    x = torch.zeros(*dq.shape[:2], sum(heads), dq.shape[-1], dtype=torch.double).requires_grad_()
    outputs = rotated_heads(x, heads, *given[3:])
    torch.autograd.backward(outputs, given[:3])
    return x.grad


def error(value, exact):
    """‖value - exact‖ / ‖exact‖; any NaN gives NaN, which fails every comparison."""
    return ((value.double().cpu() - exact).norm() / exact.norm()).item()


def check(shape, dtype, device="cpu", tables=None):
    given = inputs(shape, dtype, device, tables)
    found = rotary_backward(*given)
    assert found.dtype == dtype
    assert error(found, exact_gradient(*given)) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_written_out_equals_autograd(shape):
    given = inputs(shape, torch.float64)
    assert error(reference.backward(*given), exact_gradient(*given)) < 1e-14


def test_rotated_heads_equal_each_part_rotated():
    x = torch.randn(2, 5, 7, 8)
    cos, sin = inputs((2, 5, 3, 2, 8, 8), torch.float32)[3:]
    q, k, v = rotated_heads(x, (3, 2, 2), cos, sin)
    rotated = reference.rotate(x, cos[:, None], sin[:, None])
    assert q.equal(rotated[:, :, :3]) and k.equal(rotated[:, :, 3:5]) and v.equal(x[:, :, 5:])


@needs_triton
@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_interp_kernel_equals_float64(shape, dtype, interpreter, poisoned):
    check(shape, dtype)


@needs_triton
@interpreted_only
def test_interp_gradients_with_other_strides(interpreter, poisoned):
    """Tokens before heads, an expanded value, and strided features."""
    dq, dk, dv, *tables = inputs((2, 9, 3, 3, 16, 16), torch.float32)
    dq, dk = dq.contiguous(), torch.ones(1).expand(dk.shape)
    dv = dv.transpose(1, 3).contiguous().transpose(1, 3)
    found = rotary_backward(dq, dk, dv, *tables)
    assert error(found, exact_gradient(dq, dk, dv, *tables)) < 1e-6


@needs_triton
def test_the_grid_has_sequences_on_the_first_axis(monkeypatch):
    """CUDA's first grid axis allows 2^31 - 1 programs, the others 65,535."""
    from stepgauge.kernels.rotary import triton as kernels

    grids = []

    class Grids:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "rotary_backward_kernel", Grids())
    given = inputs((70_000, 33, 2, 1, 2, 2), torch.float32)
    kernels.backward(*given, torch.empty(70_000, 33, 4, 2))
    assert grids == [(140_000, 4)]


@needs_triton
@compiled_only
@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles_without_spills(arch):
    from stepgauge.kernels.rotary.triton import BLOCK_TOKENS, NUM_WARPS, rotary_backward_kernel

    pointers = dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr", "out_ptr"), "*bf16")
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    constants = {"WIDTH": 64, "TURNED": 64, "BLOCK_T": BLOCK_TOKENS, "BLOCK_W": 64}
    numbers = {
        n: "i32" for n in rotary_backward_kernel.arg_names if n not in pointers | tables | constants
    }
    strides = [name for name in numbers if not name.startswith("num_")]
    compiled = compile_ahead(
        rotary_backward_kernel,
        arch,
        pointers | tables | numbers,
        constants,
        aligned=[*pointers, *tables, *strides],
        options={"num_warps": NUM_WARPS},
    )
    assert "st.global.v4" in compiled.asm["ptx"] or "st.global.v8" in compiled.asm["ptx"]
    assert resources_of(compiled)["stack"] == 0


def gradients(module, of, x, rotation):
    x = x.clone().requires_grad_()
    module(x, rotation).square().sum().backward()
    found = {name: p.grad for name, p in of.named_parameters()} | {"x": x.grad}
    of.zero_grad()
    return found


def check_compiled(device, dtype, **changes):
    torch.manual_seed(0)
    spec = ModelSpec.preset("nano", d_model=64, num_heads=4, context_length=32, **changes)
    eager = Attention(spec, 0, torch.device(device)).to(dtype)
    rotation = tuple(table.to(dtype) for table in rotary_tables(spec, torch.device(device)))
    x = torch.randn(3, 21, 64, device=device, dtype=dtype)
    expected = gradients(eager, eager, x, rotation)
    found = gradients(torch.compile(eager, fullgraph=True), eager, x, rotation)
    for name, gradient in expected.items():
        assert error(found[name], gradient.double().cpu()) < 3 * TOLERANCE[dtype], name


@compiled_only
def test_a_compiled_layer_goes_through_the_operator(monkeypatch):
    """On a CPU, where the operator's backward is the oracle."""
    calls, backward = [], reference.backward
    monkeypatch.setattr(package, "_has_kernel", lambda heads, cos: True)
    monkeypatch.setattr(reference, "backward", lambda *given: calls.append(1) or backward(*given))
    check_compiled("cpu", torch.float32, num_kv_heads=2)
    assert len(calls) == 1, "the eager layer does not"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "shape", [*SHAPES, (8, 300, 25, 25, 64, 64), (2, 65, 8, 2, 96, 48), (70_000, 1, 2, 1, 8, 8)]
)
def test_gpu_kernel_equals_float64(shape, dtype):
    check(shape, dtype, "cuda")
    check(shape, dtype, "cuda", torch.float32)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"rope_fraction": 0.5}])
def test_gpu_a_compiled_layer_equals_the_eager_one(dtype, changes):
    check_compiled("cuda", dtype, **changes)
