"""SwiGLU: the oracle against autograd of the equation, the kernel against the oracle, and a compiled
feed-forward layer that goes through it.
"""

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
)

from stepgauge.kernels import swiglu as package  # noqa: E402
from stepgauge.kernels.swiglu import reference, swiglu, swiglu_backward  # noqa: E402
from stepgauge.models.feed_forward import build_feed_forward  # noqa: E402
from stepgauge.spec.model import ModelSpec  # noqa: E402

# Largest relative error (of norms) from float64: that of one rounding to the type, with a margin.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def inputs(shape, dtype, device="cpu"):
    """Returns dy (*, F) and gate_up (*, 2F) for a shape (*, F)."""
    generator = torch.Generator().manual_seed(0)
    *rows, width = shape
    dy = torch.randn(shape, generator=generator).to(device, dtype)
    return dy, (3 * torch.randn(*rows, 2 * width, generator=generator)).to(device, dtype)


def exact_gradient(dy, gate_up):
    x = gate_up.detach().double().cpu().requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    (F.silu(gate) * up * dy.double().cpu()).sum().backward()
    return x.grad


def error(value, exact):
    """‖value - exact‖ / ‖exact‖; any NaN gives NaN, which fails every comparison."""
    return ((value.double().cpu() - exact).norm() / exact.norm()).item()


def test_the_gradient_written_out_equals_autograd():
    dy, gate_up = inputs((3, 5, 24), torch.float64)
    gate, up = gate_up.chunk(2, dim=-1)
    assert error(reference.forward(gate_up), F.silu(gate) * up) < 1e-14
    assert error(reference.backward(dy, gate_up), exact_gradient(dy, gate_up)) < 1e-14


def test_second_derivatives_on_the_cpu():
    _, gate_up = inputs((2, 6), torch.float64)
    assert torch.autograd.gradgradcheck(swiglu, gate_up.requires_grad_())


@pytest.mark.parametrize(
    "gate_up", [torch.ones(()), torch.ones(2, 3), torch.ones(2, 4, dtype=torch.long)]
)
def test_unsuitable_tensors_are_refused(gate_up):
    with pytest.raises(ValueError, match="gate followed by up"):
        swiglu(gate_up)


def check(shape, dtype, device="cpu"):
    dy, gate_up = inputs(shape, dtype, device)
    found = swiglu_backward(dy, gate_up)
    assert found.dtype == dtype and found.shape == gate_up.shape
    assert error(found, exact_gradient(dy, gate_up)) < TOLERANCE[dtype]


@needs_triton
@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 101), (2, 2500), (1, 1)])
def test_interp_kernel_equals_float64(shape, dtype, interpreter, poisoned):
    check(shape, dtype)


@needs_triton
@interpreted_only
def test_interp_strided_and_empty_tensors(interpreter, poisoned):
    dy, gate_up = inputs((6, 4, 20), torch.float32)
    dy, gate_up = dy.transpose(0, 1)[:, ::2], gate_up.transpose(0, 1)[:, ::2]
    assert error(swiglu_backward(dy, gate_up), exact_gradient(dy, gate_up)) < 1e-6
    assert swiglu_backward(dy[:0], gate_up[:0]).shape == (0, 3, 40)


@needs_triton
@compiled_only
@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles_without_spills(arch):
    from stepgauge.kernels.swiglu.triton import BLOCK, NUM_WARPS, swiglu_backward_kernel

    pointers = ("dy_ptr", "gate_up_ptr", "out_ptr")
    compiled = compile_ahead(
        swiglu_backward_kernel,
        arch,
        dict.fromkeys(pointers, "*bf16"),
        {"WIDTH": 6400, "BLOCK": BLOCK},
        aligned=pointers,
        options={"num_warps": NUM_WARPS},
    )
    assert "st.global.v4" in compiled.asm["ptx"] or "st.global.v8" in compiled.asm["ptx"]
    assert resources_of(compiled)["stack"] == 0


def layer(device, dtype):
    torch.manual_seed(0)
    spec = ModelSpec.preset("nano", d_model=64, d_ff=160, feed_forward="swiglu")
    return build_feed_forward(spec, torch.device(device)).to(dtype)


def gradients(module, of, x):
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    found = {name: p.grad for name, p in of.named_parameters()} | {"x": x.grad}
    of.zero_grad()
    return found


def check_compiled(device, dtype):
    eager = layer(device, dtype)
    x = torch.randn(3, 7, 64, device=device, dtype=dtype)
    expected = gradients(eager, eager, x)
    found = gradients(torch.compile(eager, fullgraph=True), eager, x)
    for name, gradient in expected.items():
        assert error(found[name], gradient.double().cpu()) < 2 * TOLERANCE[dtype], name


@compiled_only
def test_a_compiled_layer_goes_through_the_operator(monkeypatch):
    """On a CPU, where the operator's backward is the oracle."""
    calls = []
    monkeypatch.setattr(package, "_has_kernel", lambda gate_up: True)
    backward = reference.backward
    monkeypatch.setattr(reference, "backward", lambda *given: calls.append(1) or backward(*given))
    check_compiled("cpu", torch.float32)
    assert len(calls) == 1, "the eager layer does not"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 101), (300, 6400), (1, 1), (70000, 3)])
def test_gpu_kernel_equals_float64(shape, dtype):
    check(shape, dtype, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_a_compiled_layer_equals_the_eager_one(dtype):
    check_compiled("cuda", dtype)


@pytest.mark.gpu
@needs_gpu
def test_gpu_a_second_derivative_raises():
    _, gate_up = inputs((2, 6), torch.float32, "cuda")
    (first,) = torch.autograd.grad(
        swiglu(gate_up.requires_grad_()).square().sum(), gate_up, create_graph=True
    )
    with pytest.raises(RuntimeError, match="swiglu_backward"):
        first.sum().backward()
