"""Attention that a library runs: the table of shapes, the call and its autograd with plain PyTorch
in place of the libraries, and the libraries against float64 on a Hopper GPU.
"""

import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.kernels.gluon_here import H100, needs_hopper  # noqa: E402
from tests.kernels.test_attention import (  # noqa: E402
    LIMITS,
    cancelling_scales,
    float64_reference,
    make,
    relative,
)

from stepgauge.bench import ranks  # noqa: E402
from stepgauge.kernels.attention import (  # noqa: E402
    cudnn,
    flash_attention,
    flash_attention_4,
    launching,
    libraries,
    reference,
)
from stepgauge.spec.record import Record  # noqa: E402

BF16 = torch.bfloat16
LIBRARIES = list(libraries.LIBRARIES)


def key_of(batch, heads, length, width, *, keys=None, dtype=BF16, is_causal=True, **options):
    q, k = (
        launching.View(
            (batch, heads, rows, width), (heads * rows * width, rows * width, width, 1), 0
        )
        for rows in (length, keys or length)
    )
    return launching.LaunchKey(
        0, dtype, q, k, k, is_causal=is_causal, scale=0.1, precision="ieee", overrides=(), num_splits=None,
        libraries=libraries.allowed(), **options,
    )  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch):
    """Both libraries are available and have run nothing yet."""
    monkeypatch.setenv(cudnn.OPT_OUT, "1")
    monkeypatch.setenv(flash_attention_4.OPT_OUT, "1")
    monkeypatch.setattr(flash_attention_4, "is_installed", lambda: True)
    monkeypatch.setattr(launching, "device_of", lambda index: H100)
    monkeypatch.setattr(libraries, "_refusals", {})
    monkeypatch.setattr(flash_attention_4, "_failures", {})
    libraries.calls.clear()


def taken(key):
    """Which library runs the forward, and which the backward."""
    rows = [libraries.rows_of(passes, key) for passes in ("forward", "backward")]
    return " ".join(each[0].library if each else "ours" for each in rows)


@pytest.mark.parametrize(
    "shape, with_fa4, without",
    [
        ((2, 8, 4096, 256), "fa4 cudnn", "cudnn cudnn"),
        ((2, 8, 4096, 160), "cudnn cudnn", "cudnn cudnn"),
        ((1, 1, 4096, 256), "ours ours", "ours ours"),  # too few queries to fill the chip
        ((1, 16, 16384, 128), "ours fa4", "ours cudnn"),
        ((1, 16, 4096, 128), "ours ours", "ours ours"),
        ((1, 16, 16384, 64), "fa4 fa4", "ours cudnn"),
        (
            (1, 8, 8192, 64),
            "ours cudnn",
            "ours cudnn",
        ),  # too short for FA4's host
        ((1, 1, 16384, 64), "ours ours", "ours ours"),  # we split the loop of a single head
        ((4, 16, 512, 64), "ours ours", "ours ours"),
    ],
)
def test_table_selects_the_library_for_a_shape(on_hopper, monkeypatch, shape, with_fa4, without):
    assert taken(key_of(*shape)) == with_fa4
    monkeypatch.setattr(flash_attention_4, "is_installed", lambda: False)
    assert taken(key_of(*shape)) == without


def test_every_row_matches_the_shapes_it_was_measured_on(on_hopper):
    for row in libraries.TABLE:
        for measured in row.measured:
            key = key_of(*measured.shape, row.max_width, window=4096 * (row.seen == "window"))
            assert row in libraries.rows_of(row.passes, key)
            assert measured.library_ms < measured.ours_ms


def test_unsupported_launches_run_in_our_kernels(on_hopper, monkeypatch):
    shape = 1, 16, 16384, 64
    assert taken(key_of(*shape, dtype=torch.float32)) == "ours ours"
    assert taken(key_of(*shape, keys=16383)) == "ours ours"  # they align the mask to another corner
    assert taken(key_of(*shape, keys=32768, is_causal=False)) == "fa4 fa4"
    assert taken(key_of(*shape, keys=4096, is_causal=False)) == "ours fa4"
    assert taken(key_of(*shape, is_packed=True)) == "ours ours"
    assert "cudnn" not in taken(key_of(*shape, window=128))
    monkeypatch.setattr(launching, "device_of", lambda index: H100._replace(arch=80))
    assert taken(key_of(*shape)) == "ours ours"


def test_switches_that_turn_libraries_off(on_hopper, monkeypatch):
    assert taken(key_of(1, 16, 16384, 64)) == "fa4 fa4"
    monkeypatch.setenv(flash_attention_4.OPT_OUT, "0")
    assert taken(key_of(1, 16, 16384, 64)) == "ours cudnn"
    shape = 2, 8, 4096, 256
    deterministic = "are_deterministic_algorithms_enabled"
    for switch, off, on in [
        (lambda value: monkeypatch.setattr(torch, deterministic, lambda: value), True, False),
        (torch.backends.cuda.enable_cudnn_sdp, False, True),
        (lambda value: monkeypatch.setenv(cudnn.OPT_OUT, value), "0", "1"),
    ]:
        switch(off)
        try:
            assert taken(key_of(*shape)) == "ours ours"
        finally:
            switch(on)
        assert taken(key_of(*shape)) == "cudnn cudnn"


def test_is_installed(monkeypatch):
    for package, expected in [("torch", True), ("no-such-package", False)]:
        monkeypatch.setattr(flash_attention_4, "PACKAGE", package)
        flash_attention_4.is_installed.cache_clear()
        assert flash_attention_4.is_installed() == expected
    flash_attention_4.is_installed.cache_clear()


def test_package_that_does_not_load_warns_once_and_is_turned_off(on_hopper, monkeypatch):
    monkeypatch.setattr(flash_attention_4, "_load_errors", [])
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    flash_attention_4._interface.cache_clear()
    key, x = key_of(1, 16, 16384, 64), torch.empty(1, 16, 16384, 64, device="meta", dtype=BF16)
    assert flash_attention_4.is_allowed()
    with pytest.warns(UserWarning, match="FlashAttention-4 is installed but does not load"):
        assert libraries.forward(key, x, x, x) is None
    assert not flash_attention_4.is_allowed() and "fa4" not in libraries.allowed()
    flash_attention_4._interface.cache_clear()


def test_cache_of_refusals_is_bounded(on_hopper, monkeypatch):
    monkeypatch.setattr(libraries, "_MAX_REFUSALS", 3)
    monkeypatch.setattr(libraries, "TABLE", everything("fa4"))
    monkeypatch.setattr(flash_attention_4, "refusal", lambda *arguments: "it does not")
    x = torch.empty(0)
    for length in range(64, 74):
        assert libraries.forward(key_of(1, 1, length, 64), x, x, x) is None
        assert len(libraries._refusals) <= 3


def test_an_output_for_a_batch_of_one_is_not_broadcast():
    x = torch.empty_strided((1, 2, 8, 4), (0, 4, 8, 1))  # compiled code passes such strides
    empty = flash_attention_4._empty_like(x)
    assert torch.empty_like(x).stride(0) == 0 and 0 not in empty.stride()
    assert empty.shape == x.shape and empty.stride()[1:] == x.stride()[1:]


# ---- the call, with the libraries' operators in plain PyTorch ------------------------------------


def forward_in_pytorch(q, k, v, bias, keeps_lse, dropout, is_causal, debug, *, scale):
    assert bias is None and keeps_lse and dropout == 0
    o, lse = in_pytorch_forward(q, k, v, is_causal, scale)
    return o.to(q.dtype), lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2]


def backward_in_pytorch(do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, num_queries, num_keys,
                        dropout, is_causal, *, scale):  # fmt: skip
    strides = torch.empty_like(q).stride()
    assert o.stride() == do.stride() == strides and lse.shape == (*q.shape[:3], 1)
    assert (num_queries, num_keys, dropout) == (q.shape[2], k.shape[2], 0)
    grads = in_pytorch_backward(do, q, k, v, o, lse.squeeze(-1), is_causal, scale)
    return tuple(x.to(BF16) for x in grads)


def in_pytorch_forward(q, k, v, is_causal, scale, **bounds):
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return reference.attention(q.float(), k, v, is_causal=is_causal, scale=scale, **bounds)


def in_pytorch_backward(do, q, k, v, o, lse, is_causal, scale, **bounds):
    batch, heads, length, width = k.shape
    group = q.shape[1] // heads
    do, q, k, v, o = (x.float() for x in (do, q, k, v, o))
    wide = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    dq, *parts = reference.backward(do, q, *wide, o, lse, is_causal, scale, **bounds)
    return dq, *(x.view(batch, heads, group, length, width).sum(2) for x in parts)


def fa4_forward(q, k, v, *, out, return_lse, softmax_scale, causal, **bounds):
    """Writes `out`, which like all tensors is (B, T, H, D) or (T, H, D), the library's order."""
    assert return_lse and out.shape == q.shape and out.stride(-1) == 1
    q, k, v = map(heads_first, (q, k, v))
    o, lse = in_pytorch_forward(q, k, v, causal, softmax_scale, **bounds_of(causal, **bounds))
    heads_first(out).copy_(o)
    return out, lse if out.ndim == 4 else lse[0], None, None


def fa4_backward(q, k, v, o, do, lse, *, dq, dk, dv, softmax_scale, causal, **bounds):
    assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3]) and lse.dtype == torch.float32
    tensors = (*map(heads_first, (do, q, k, v, o)), lse.view(-1, *lse.shape[-2:]))
    grads = in_pytorch_backward(*tensors, causal, softmax_scale, **bounds_of(causal, **bounds))
    for out, grad in zip((dq, dk, dv), grads, strict=True):
        heads_first(out).copy_(grad)
    return dq, dk, dv


def heads_first(x):
    return x.transpose(-3, -2).view(-1, x.shape[-2], x.shape[-3], x.shape[-1])


def bounds_of(
    causal, window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None
):
    assert cu_seqlens_q is cu_seqlens_k
    if window_size_left is None:
        return {"cu_seqlens": cu_seqlens_q}
    assert window_size_right == (0 if causal else window_size_left)
    return {"window": window_size_left + 1, "cu_seqlens": cu_seqlens_q}


def everything(library, **options):
    """A table that lets the library run every shape."""
    row = libraries.Row(library, "forward", 1, 256, 1, 1, (), **options)
    return row, row._replace(passes="backward")


@pytest.fixture
def in_pytorch(on_hopper, monkeypatch):
    # imported now, because its import needs torch's own operators
    import torch.distributed.tensor
    import torch.distributed.tensor._ops

    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", lambda params, debug: True)
    for name, function in [
        ("_scaled_dot_product_cudnn_attention", forward_in_pytorch),
        ("_scaled_dot_product_cudnn_attention_backward", backward_in_pytorch),
    ]:
        monkeypatch.setattr(torch.ops.aten, name, function)
    fa4 = types.SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    monkeypatch.setattr(flash_attention_4, "_interface", lambda: fa4)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("library, width", [("cudnn", 160), ("cudnn", 256), ("fa4", 96)])
def test_operator_with_a_library_equals_float64_and_differentiates_once(
    in_pytorch, monkeypatch, library, width, is_causal
):
    monkeypatch.setattr(libraries, "TABLE", everything(library))
    # transposed from (B, T, H, D), as a projection leaves them
    tensors = make((2, 40, 4, width), (2, 40, 2, width), BF16)
    q, k, v, do = (x.transpose(1, 2) for x in tensors)
    expected = float64_reference(q, k, v, do, is_causal)
    scales = cancelling_scales(q, k, v, do, is_causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = torch.ops.stepgauge.flash_attention(*leaves, is_causal, width**-0.5)
    grads = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for value, want, scale in zip((o, lse, *grads), expected, scales, strict=True):
        assert relative(value, want, scale) < LIMITS[BF16]
    assert libraries.calls == {("forward", library): 1, ("backward", library): 1}
    assert o.stride() == q.stride() and [g.stride() for g in grads] == [x.stride() for x in leaves]
    for expanded in (do.sum().expand_as(o), do):
        (dq,) = torch.autograd.grad(o, q, expanded, retain_graph=True, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            dq.sum().backward()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window, ends", [(7, None), (0, (0, 11, 11, 30)), (5, (0, 25))])
def test_library_gets_window_and_packed_sequences(in_pytorch, monkeypatch, is_causal, window, ends):
    """Also with tokens after the last packed sequence."""
    seen = {"window": window, "cu_seqlens": None if ends is None else torch.tensor(ends).int()}
    monkeypatch.setattr(libraries, "TABLE", everything("fa4", seen="packed" if ends else "window"))
    q, k, v, do = make((1, 2, 40, 64), (1, 2, 40, 64), BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = torch.ops.stepgauge.flash_attention(*leaves, is_causal, 0.125, *seen.values())
    got = (o, *torch.autograd.grad(o, leaves, do))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want, _ = reference.attention(*wide, is_causal=is_causal, scale=0.125, **seen)
    for value, exact in zip(
        got, (want, *torch.autograd.grad(want, wide, do.double())), strict=True
    ):
        assert relative(value, exact) < LIMITS[BF16]
    assert set(libraries.calls) == {("forward", "fa4"), ("backward", "fa4")}


def test_failed_launch_is_remembered_and_the_next_row_runs(in_pytorch, monkeypatch):
    calls = []

    def fails(*arguments, **options):
        calls.append(arguments)
        raise RuntimeError("cuDNN Frontend error: no plan")

    monkeypatch.setattr(libraries, "TABLE", (*everything("cudnn"), *everything("fa4")))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", fails)
    key, x = key_of(2, 4, 64, 256), torch.zeros(2, 4, 64, 256, dtype=BF16)
    for _ in range(2):
        assert libraries.forward(key, x, x, x)[0].shape == x.shape
    assert len(calls) == 1 and libraries.calls == {("forward", "fa4"): 2}
    monkeypatch.setattr(libraries, "TABLE", everything("cudnn"))
    monkeypatch.setattr(libraries, "_refusals", {})
    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", lambda params, debug: False)
    assert libraries.forward(key, x, x, x) is None
    assert len(calls) == 1


def test_fa4_that_does_not_compile_warns_once_and_is_not_retried(in_pytorch, monkeypatch):
    def fails(*arguments, **options):
        raise AssertionError("(head_dim, head_dim_v)=(64, 64) is not supported")

    fa4 = types.SimpleNamespace(_flash_attn_fwd=fails)
    monkeypatch.setattr(flash_attention_4, "_interface", lambda: fa4)
    monkeypatch.setattr(libraries, "TABLE", everything("fa4"))
    x = torch.zeros(2, 4, 64, 64, dtype=BF16)
    with pytest.warns(UserWarning, match="FlashAttention-4 cannot run this forward .* not supp"):
        assert libraries.forward(key_of(2, 4, 64, 64), x, x, x) is None
    x = torch.zeros(2, 4, 128, 64, dtype=BF16)
    assert libraries.forward(key_of(2, 4, 128, 64), x, x, x) is None and not libraries.calls
    x = torch.zeros(2, 4, 64, 65, dtype=BF16)  # rows of 130 bytes
    assert "16 bytes" in flash_attention_4.refusal("forward", key_of(2, 4, 64, 65), None, x, x, x)


def test_backward_bytes(on_hopper, monkeypatch):
    def bytes_of(batch, heads, length, width, *bounds, kv_heads=None):
        q, k = (
            torch.empty(batch, each, length, width, dtype=BF16, device="meta")
            for each in (heads, kv_heads or heads)
        )
        lse = torch.empty(batch, heads, length, device="meta")
        return libraries.backward_bytes([q, q, k, k, q, lse, True, 0.1, *bounds])

    rows = 2 * 8 * 4096
    assert bytes_of(2, 8, 4096, 256) == rows * (4 * 256 + 4)
    assert bytes_of(2, 8, 4096, 192) == rows * (4 * 256 + 4) + 8 * rows * 256 * 2
    assert bytes_of(2, 8, 4096, 128) == bytes_of(2, 8, 4096, 256, 512) == 0
    monkeypatch.setattr(libraries, "TABLE", (*everything("cudnn", seen="window"), *libraries.TABLE))
    assert bytes_of(2, 8, 4096, 256, 512) == rows * (4 * 256 + 4)
    rows = 16 * 16384
    assert bytes_of(1, 16, 16384, 64) == rows * 4 * (64 + 2)
    grouped = 2 * 4 * 16384 * 64 * 4  # dk and dv
    assert bytes_of(1, 16, 16384, 64, 0, None, kv_heads=4) == rows * 4 * (64 + 2) + grouped


def test_a_record_names_the_libraries(in_pytorch, monkeypatch):
    monkeypatch.setattr(libraries, "TABLE", everything("cudnn"))
    x = torch.zeros(2, 4, 64, 256, dtype=BF16)
    libraries.forward(key_of(2, 4, 64, 256), x, x, x)
    record = ranks.with_launchers(Record(kind="step", spec={}))
    assert record.environment["native"] == {"attention's forward": "cuDNN"}


@pytest.mark.parametrize("width", [128, 160])
def test_torchs_operators_accept_the_arguments(width):
    """Runs the operators on the meta device, which checks the schemas and the results' strides."""
    q = torch.empty(2, 512, 8, width, dtype=BF16, device="meta").transpose(1, 2)
    k = torch.empty(2, 512, 2, width, dtype=BF16, device="meta").transpose(1, 2)
    views = [launching.View(x.shape, x.stride(), 0) for x in (q, k, k)]
    key = key_of(1, 1, 1, 1)._replace(**dict(zip("qkv", views, strict=True)))
    o, lse = cudnn.forward(key, None, q, k, k)
    assert o.stride() == q.stride() and lse.shape == q.shape[:3]
    do = torch.empty_like(q).transpose(1, 2).contiguous().transpose(1, 2)
    grads = cudnn.backward(key, None, q, k, k, do, torch.empty_like(q), lse)
    assert [g.stride() for g in grads] == [x.stride() for x in (q, k, k)]


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    """The name of a library that runs every shape; skips the test if it is not installed."""
    for each in libraries.LIBRARIES.values():
        monkeypatch.setenv(each.OPT_OUT, "1")
    if not libraries.LIBRARIES[request.param].is_allowed():
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(libraries, "TABLE", everything(request.param))
    libraries.calls.clear()
    return request.param


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "heads, kv_heads, length, width, how",
    [
        (8, 8, 1024, 256, "eager"),
        (8, 2, 1100, 160, "eager"),
        (2, 2, 2048, 64, "eager"),
        (5, 5, 777, 96, "eager"),
        *((4, 1, 1111, 128, how) for how in ("eager", "compiled", "autocast")),
    ],
)
def test_gpu_a_library_equals_float64(library, heads, kv_heads, length, width, how, is_causal):
    dtype = torch.float32 if how == "autocast" else BF16
    tensors = make((2, length, heads, width), (2, length, kv_heads, width), dtype, "cuda")
    q, k, v, do = (x.transpose(1, 2) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    function = torch.compile(flash_attention) if how == "compiled" else flash_attention
    with torch.autocast("cuda", BF16, enabled=how == "autocast"):
        o = function(*leaves, is_causal=is_causal)
    assert o.dtype == BF16
    grads = torch.autograd.grad(o, leaves, do.to(BF16))
    assert libraries.calls == {("forward", library): 1, ("backward", library): 1}
    o_want, _, *grads_want = float64_reference(q, k, v, do, is_causal)
    for value, want in zip((o, *grads), (o_want, *grads_want), strict=True):
        assert relative(value, want) < 2 * LIMITS[BF16]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window, ends", [(300, None), (0, (0, 700, 700, 1300)), (200, (0, 700))])
def test_gpu_fa4_with_window_and_packed_sequences(
    on_hopper_with_fa4, monkeypatch, window, ends, is_causal
):
    results = []
    ends = None if ends is None else torch.tensor(ends, device="cuda", dtype=torch.int32)
    for table in (everything("fa4", seen="window" if ends is None else "packed"), ()):
        monkeypatch.setattr(libraries, "TABLE", table)
        q, k, v, do = make((1, 8, 1500, 64), (1, 2, 1500, 64), BF16, "cuda")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, _ = torch.ops.stepgauge.flash_attention(*leaves, is_causal, 0.125, window, ends)
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    assert libraries.calls == {("forward", "fa4"): 1, ("backward", "fa4"): 1}
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < 2 * LIMITS[BF16]


@pytest.fixture
def on_hopper_with_fa4(monkeypatch):
    monkeypatch.setenv(flash_attention_4.OPT_OUT, "1")
    if not flash_attention_4.is_allowed():
        pytest.skip("flash-attn-4 is not installed")
    libraries.calls.clear()


@pytest.mark.gpu
@needs_hopper
def test_gpu_gradient_with_other_strides(library):
    """torch caches cuDNN's plans by the strides of q, k and v, so grad_o's must not matter."""
    q, k, v, do = make((2, 8, 1024, 128), (2, 8, 1024, 128), BF16, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(flash_attention(*leaves, is_causal=True), leaves, do)
    other = do.transpose(1, 2).contiguous().transpose(1, 2)
    second = torch.autograd.grad(flash_attention(*leaves, is_causal=True), leaves, other)
    for one, two in zip(first, second, strict=True):
        assert relative(one, two) < LIMITS[BF16]
