"""SwiGLU's feed-forward layer with the gate in its products, compared with plain PyTorch."""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from tests.kernels.triton_here import needs_gpu  # noqa: E402

from stepgauge.kernels.swiglu import quack  # noqa: E402
from stepgauge.kernels.swiglu.feed_forward import (  # noqa: E402
    deinterleaved,
    interleaved,
    swiglu_feed_forward,
)
from stepgauge.models.feed_forward import build_feed_forward  # noqa: E402
from stepgauge.spec.layout_step import LayoutSpec  # noqa: E402
from stepgauge.spec.model import ModelSpec  # noqa: E402
from stepgauge.spec.step import StepSpec  # noqa: E402

NAMES = ("y", "dx", "d_gate_up", "d_down")


def inputs(dtype, device="cpu", tokens=(2, 33), width=16, hidden=24):
    torch.manual_seed(0)
    shapes = (*tokens, width), (2 * hidden, width), (width, hidden)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def written_out(x, gate_up_weight, down_weight):
    gate, up = (x @ gate_up_weight.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down_weight.T


def with_gradients(layer, x, *weights):
    """Returns y, and the gradients of the sum of its squares."""
    y = layer(x, *weights)
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, *weights))


def errors(found, exact):
    return {n: ((f.double().cpu() - e.cpu()).norm() / e.cpu().norm()).item()
            for n, f, e in zip(NAMES, found, exact, strict=True)}  # fmt: skip


def test_deinterleaved_is_the_inverse_of_interleaved():
    rows = torch.arange(6)[:, None]
    assert interleaved(rows).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(deinterleaved(interleaved(rows)), rows)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_equals_plain_pytorch(compiled):
    given = inputs(torch.float64)
    layer = swiglu_feed_forward
    if compiled:
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    exact = with_gradients(written_out, *given)
    assert max(errors(with_gradients(layer, *given), exact).values()) < 1e-6  # squares in fp32
    y = layer(*given)
    assert (y - exact[0]).abs().max() < 1e-13


def test_under_autocast_gradients_have_the_weights_type():
    given = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, *gradients = with_gradients(swiglu_feed_forward, *given)
    assert y.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    exact = with_gradients(written_out, *(t.detach().double().requires_grad_() for t in given))
    assert max(errors((y, *gradients), exact).values()) < 0.02


def test_a_second_derivative_raises():
    given = inputs(torch.float64)
    y = swiglu_feed_forward(*given)
    (first,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_product_backward"):
        first.sum().backward()


def test_a_network_uses_it_with_gate_quack():
    x = torch.randn(2, 5, 64)
    found = []
    for gate in ("torch", "quack"):
        torch.manual_seed(0)
        spec = ModelSpec.preset("nano", d_model=64, d_ff=160, gate=gate)
        found.append(build_feed_forward(spec, torch.device("cpu"))(x))
    assert (found[0] - found[1]).abs().max() < 1e-5
    assert not torch.equal(*found), "both took the same way"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelSpec(gate="quack", feed_forward="gelu"),
            "needs swiglu without experts and biases",
        ),
        (
            lambda: ModelSpec(gate="quack", feed_forward_bias=True),
            "needs swiglu without experts and biases",
        ),
        (
            lambda: StepSpec(model=ModelSpec(gate="quack"), precision="fp32", device="cuda"),
            "supports only 16-bit types on a GPU; precision is 'fp32'",
        ),
        (
            lambda: LayoutSpec(model=ModelSpec(gate="quack"), layout="tp2", batch=2),
            "which tp2 does not support",
        ),
    ],
)
def test_unsupported_uses_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_quack_that_cannot_compute_its_keys_is_refused_in_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "library.py").write_text("raise TypeError('no semantic key')")
    for name in ("quack", "quack.epilogue"):
        stand_in = ModuleType(name)
        stand_in.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, "quack.epilogue.library", raising=False)
    with pytest.raises(ValueError, match="a folder called site-packages") as raised:
        quack._require_keys()
    assert "no semantic key" in str(raised.value.__cause__)


@pytest.fixture
def with_quack():
    try:
        quack.require(torch.device("cuda"))
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("with_quack")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [((2, 33), 64, 160), ((1000,), 1600, 6400), ((1,), 8, 8)])
def test_gpu_it_is_as_exact_as_torchs_matrix_products(sizes, dtype):
    given = inputs(dtype, "cuda", *sizes)
    given = [(t.detach() * t.shape[-1] ** -0.5).requires_grad_() for t in given]
    exact = with_gradients(written_out, *(t.detach().double().requires_grad_() for t in given))
    ours = errors(with_gradients(swiglu_feed_forward, *given), exact)
    torchs = errors(with_gradients(written_out, *given), exact)
    for name, error in ours.items():
        assert error < 1.2 * torchs[name] + 1e-4, (name, ours, torchs)
