"""Shapes that cuDNN runs: the table, the call with everything around it (cuDNN itself stands in for by
plain PyTorch here), and, on a Hopper GPU, against float64.
"""

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

from stepgauge.bench import launchers  # noqa: E402
from stepgauge.kernels.attention import cudnn, flash_attention, launching, reference  # noqa: E402
from stepgauge.spec.record import Record  # noqa: E402

BF16 = torch.bfloat16


def key_of(batch, heads, length, width, *, keys=None, dtype=BF16, **options):
    q, k = (
        launching.View(
            (batch, heads, rows, width), (heads * rows * width, rows * width, width, 1), 0
        )
        for rows in (length, keys or length)
    )
    return launching.LaunchKey(
        0, dtype, q, k, k, is_causal=True, scale=0.1, precision="ieee", overrides=(), num_splits=None,
        may_use_cudnn=cudnn.is_allowed(), **options,
    )  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setenv(cudnn.OPT_OUT, "1")
    monkeypatch.setattr(launching, "device_of", lambda index: H100)
    monkeypatch.setattr(cudnn, "_refusals", {})
    cudnn.calls.clear()


def taken(key):
    return "".join(name[0] for name in ("forward", "backward") if cudnn.row_of(name, key))


@pytest.mark.parametrize(
    "shape, passes",
    [
        ((2, 8, 4096, 256), "fb"),
        ((2, 8, 4096, 160), "fb"),
        ((1, 1, 4096, 256), ""),  # too few queries to fill the chip
        ((1, 16, 16384, 128), "b"),
        ((1, 16, 4096, 128), ""),
        ((1, 16, 16384, 64), "b"),
        ((1, 1, 16384, 64), ""),  # ours splits the loop of one head
        ((1, 1, 32768, 64), "b"),
        ((1, 20, 3001, 96), ""),
        ((1, 16, 16384, 96), ""),  # not measured
    ],
)
def test_the_table_says_who_runs_a_shape(on_hopper, shape, passes):
    assert taken(key_of(*shape)) == passes


def test_every_row_holds_what_it_was_measured_on(on_hopper):
    for row in cudnn.TABLE:
        for measured in row.measured:
            assert cudnn.row_of(row.passes, key_of(*measured.shape, row.widest)) == row
            assert measured.cudnn_ms < measured.ours_ms


def test_what_cudnn_does_not_compute_is_ours(on_hopper, monkeypatch):
    shape = 2, 8, 4096, 256
    assert not taken(key_of(*shape, dtype=torch.float32))
    assert not taken(key_of(*shape, keys=4095))  # another corner of the mask
    assert not taken(key_of(*shape, window=128))
    assert not taken(key_of(*shape, is_packed=True))
    monkeypatch.setattr(launching, "device_of", lambda index: H100._replace(arch=80))
    assert not taken(key_of(*shape))


def test_three_ways_to_keep_ours(on_hopper, monkeypatch):
    shape = 2, 8, 4096, 256
    for off, on in [
        (lambda: monkeypatch.setenv(cudnn.OPT_OUT, "0"), lambda: monkeypatch.delenv(cudnn.OPT_OUT)),
        *(
            (lambda switch=switch, value=value: switch(value), lambda switch=switch, value=value: switch(not value))
            for switch, value in [
                (torch.use_deterministic_algorithms, True),
                (torch.backends.cuda.enable_cudnn_sdp, False),
            ]
        ),
    ]:  # fmt: skip
        off()
        try:
            assert not taken(key_of(*shape))
        finally:
            on()
        assert taken(key_of(*shape)) == "fb"


# ---- the call, with cuDNN's operators in plain PyTorch -------------------------------------------


def forward_in_pytorch(q, k, v, bias, keeps_lse, dropout, is_causal, debug, *, scale):
    assert bias is None and keeps_lse and dropout == 0
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    o, lse = reference.attention(q.float(), k, v, is_causal=is_causal, scale=scale)
    return o.to(q.dtype), lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2]


def backward_in_pytorch(do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, num_queries, num_keys,
                        dropout, is_causal, *, scale):  # fmt: skip
    strides = torch.empty_like(q).stride()
    assert o.stride() == do.stride() == strides and lse.shape == (*q.shape[:3], 1)
    assert (num_queries, num_keys, dropout) == (q.shape[2], k.shape[2], 0)
    batch, heads, length, width = k.shape
    group = q.shape[1] // heads
    do, q, k, v, o = (x.float() for x in (do, q, k, v, o))
    wide = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    dq, *parts = reference.backward(do, q, *wide, o, lse.squeeze(-1), is_causal, scale)
    dk, dv = (x.view(batch, heads, group, length, width).sum(2) for x in parts)
    return dq.to(BF16), dk.to(BF16), dv.to(BF16)


@pytest.fixture
def in_pytorch(on_hopper, monkeypatch):
    rows = tuple(row._replace(least_length=1, least_queries=1) for row in cudnn.TABLE)
    monkeypatch.setattr(cudnn, "TABLE", rows)
    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", lambda params, debug: True)
    for name, function in [
        ("_scaled_dot_product_cudnn_attention", forward_in_pytorch),
        ("_scaled_dot_product_cudnn_attention_backward", backward_in_pytorch),
    ]:
        monkeypatch.setattr(torch.ops.aten, name, function)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("width", [160, 256])
def test_the_operator_is_right_by_cudnn_and_differentiates_once(in_pytorch, width, is_causal):
    # as a projection leaves them: heads beside each other, padded ones copied
    tensors = make((2, 40, 4, width), (2, 40, 2, width), BF16)
    q, k, v, do = (x.transpose(1, 2) for x in tensors)
    expected = float64_reference(q, k, v, do, is_causal)
    scales = cancelling_scales(q, k, v, do, is_causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = torch.ops.stepgauge.flash_attention(*leaves, is_causal, width**-0.5)
    grads = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for value, want, scale in zip((o, lse, *grads), expected, scales, strict=True):
        assert relative(value, want, scale) < LIMITS[BF16]
    assert cudnn.calls == {"forward": 1, "backward": 1}
    assert o.stride() == q.stride() and [g.stride() for g in grads] == [x.stride() for x in leaves]
    for expanded in (do.sum().expand_as(o), do):
        (dq,) = torch.autograd.grad(o, q, expanded, retain_graph=True, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            dq.sum().backward()


def test_a_refusal_of_cudnn_is_asked_for_once(in_pytorch, monkeypatch):
    asked = []

    def refuses(*arguments, **options):
        asked.append(arguments)
        raise RuntimeError("cuDNN Frontend error: no plan")

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", refuses)
    key, x = key_of(2, 4, 64, 256), torch.zeros(2, 4, 64, 256, dtype=BF16)
    assert cudnn.forward(key, x, x, x) is None
    assert cudnn.forward(key, x, x, x) is None
    assert len(asked) == 1 and not cudnn.calls
    monkeypatch.setattr(cudnn, "_refusals", {})
    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", lambda params, debug: False)
    assert cudnn.forward(key, x, x, x) is None
    assert len(asked) == 1


def test_the_memory_of_its_backward_is_told(on_hopper):
    def told(batch, heads, length, width, *bounds):
        q = torch.empty(batch, heads, length, width, dtype=BF16, device="meta")
        lse = torch.empty(batch, heads, length, device="meta")
        return cudnn.backward_bytes([q, q, q, q, q, lse, True, 0.1, *bounds])

    rows = 2 * 8 * 4096
    assert told(2, 8, 4096, 256) == rows * (4 * 256 + 4)
    assert told(2, 8, 4096, 192) == rows * (4 * 256 + 4) + 8 * rows * 256 * 2
    assert told(2, 8, 4096, 128) == told(2, 8, 4096, 256, 512) == 0


def test_a_record_names_cudnn(in_pytorch):
    x = torch.zeros(2, 4, 64, 256, dtype=BF16)
    cudnn.forward(key_of(2, 4, 64, 256), x, x, x)
    record = launchers.with_launchers(Record(kind="step", spec={}))
    assert record.environment["native"] == {"attention's forward": "cuDNN"}


@pytest.mark.parametrize("width", [128, 160])
def test_torchs_operators_take_the_arguments(width):
    """By their schemas and kernels without memory, which also say how results lie."""
    q = torch.empty(2, 512, 8, width, dtype=BF16, device="meta").transpose(1, 2)
    k = torch.empty(2, 512, 2, width, dtype=BF16, device="meta").transpose(1, 2)
    views = [launching.View(x.shape, x.stride(), 0) for x in (q, k, k)]
    key = key_of(1, 1, 1, 1)._replace(**dict(zip("qkv", views, strict=True)))
    wide = [cudnn._padded(x, 256 if width > 128 else width) for x in (q, k, k)]
    o, lse = cudnn._forward(key, *wide)
    assert o.stride() == q.stride() and lse.shape == q.shape[:3]
    do = torch.empty_like(wide[0]).transpose(1, 2).contiguous().transpose(1, 2)
    grads = cudnn._backward(key, *wide, do, torch.empty_like(wide[0]), lse)
    assert [g.stride() for g in grads] == [x.stride() for x in (q, k, k)]


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "heads, kv_heads, length, width",
    [(8, 8, 1024, 256), (8, 2, 1100, 160), (2, 2, 16384, 64), (4, 1, 8192, 128)],
)
def test_gpu_cudnn_equals_float64(heads, kv_heads, length, width, is_causal, compiles, monkeypatch):
    monkeypatch.setenv(cudnn.OPT_OUT, "1")
    cudnn.calls.clear()
    batch = 2 if width > 128 else 1
    tensors = make((batch, length, heads, width), (batch, length, kv_heads, width), BF16, "cuda")
    q, k, v, do = (x.transpose(1, 2) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    function = torch.compile(flash_attention) if compiles else flash_attention
    o = function(*leaves, is_causal=is_causal)
    grads = torch.autograd.grad(o, leaves, do)
    assert cudnn.calls == ({"forward": 1} if width > 128 else {}) | {"backward": 1}
    monkeypatch.setenv(cudnn.OPT_OUT, "0")
    ours = flash_attention(*leaves, is_causal=is_causal)
    for value, want in zip(
        (o, *grads), (ours, *torch.autograd.grad(ours, leaves, do)), strict=True
    ):
        assert relative(value, want) < 2 * LIMITS[BF16]


@pytest.mark.gpu
@needs_hopper
def test_gpu_one_set_of_strides_after_another(monkeypatch):
    """cuDNN's plans are kept by the strides of q, k and v: another layout of grad_o is copied."""
    monkeypatch.setenv(cudnn.OPT_OUT, "1")
    q, k, v, do = make((2, 8, 1024, 256), (2, 8, 1024, 256), BF16, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(flash_attention(*leaves, is_causal=True), leaves, do)
    other = do.transpose(1, 2).contiguous().transpose(1, 2)
    second = torch.autograd.grad(flash_attention(*leaves, is_causal=True), leaves, other)
    for one, two in zip(first, second, strict=True):
        assert relative(one, two) < LIMITS[BF16]
