"""Small eager attention in torch's scaled_dot_product_attention: which calls use it, and their
results.
"""

import pytest

torch = pytest.importorskip("torch")

from types import SimpleNamespace  # noqa: E402

from tests.kernels.test_attention import float64_reference  # noqa: E402

from stepgauge.kernels.attention import by_torch, flash_attention, libraries  # noqa: E402

SMALL = (4, 512, 12, 64)  # (B, T, H, D), the order in which a projection leaves them in memory


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setattr(by_torch, "IS_ALLOWED", True)


def on_gpu(shape, dtype=torch.bfloat16):
    """A (B, H, T, D) tensor with memory in the order of `shape`, (B, T, H, D)."""
    return like(torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2))


def like(x):
    return SimpleNamespace(shape=x.shape, dtype=x.dtype, stride=x.stride, is_cuda=True)


def takes(q, k=None, v=None, scale=None, window=0, cu_seqlens=None):
    return by_torch.takes(q, k or q, v or q, scale, window, cu_seqlens)


def test_takes_small_calls():
    q = on_gpu(SMALL)
    assert takes(q) and takes(on_gpu((2, 300, 3, 40), torch.float16))
    assert not takes(on_gpu((4, 512, 13, 64)))  # larger than MOST_PRODUCTS
    assert not takes(on_gpu(SMALL, torch.float32)) and not takes(q, v=on_gpu(SMALL, torch.float16))
    assert not takes(q, k=on_gpu((4, 512, 4, 64)))
    assert not takes(on_gpu((2, 300, 3, 36)))
    assert takes(on_gpu((1, 64, 2, 256))) and not takes(on_gpu((1, 64, 2, 264)))
    assert not any([takes(q, scale=0.1), takes(q, window=8), takes(q, cu_seqlens=object())])


def test_takes_only_tensors_in_torchs_memory_order():
    assert not takes(like(torch.empty(4, 12, 512, 64, dtype=torch.bfloat16, device="meta")))
    assert takes(like(torch.empty(4, 1, 512, 64, dtype=torch.bfloat16, device="meta")))


def test_takes_nothing_if_deterministic_or_without_flash_or_turned_off(monkeypatch):
    q = on_gpu(SMALL)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not takes(q)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not takes(q)
    monkeypatch.undo()
    monkeypatch.setattr(by_torch, "IS_ALLOWED", False)
    assert not takes(q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("is_causal", [True, False])
def test_gpu_equals_float64(is_causal):
    made = torch.randn(4, 2, 300, 3, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v, do = (x.transpose(1, 2) for x in made)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    libraries.calls.clear()
    o = flash_attention(*leaves, is_causal=is_causal)
    assert libraries.calls == {("forward", "torch"): 1} and o.stride() == q.stride()
    alone = torch.randn(2, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
    assert flash_attention(alone, alone, alone, is_causal=is_causal).stride() == alone.stride()
    assert libraries.titles_by_pass() == {"forward": by_torch.TITLE}
    grads = torch.autograd.grad(o, leaves, do, create_graph=True)
    expected_o, _, *expected = float64_reference(q, k, v, do, is_causal)
    for value, want in zip((o, *grads), (expected_o, *expected), strict=True):
        assert (value - want).norm() < 0.01 * want.norm()
    with pytest.raises(RuntimeError):
        grads[0].sum().backward()
