"""The forward in Gluon: compiled for sm_90 without a GPU, when it is used, and its results on a
GPU.
"""

import itertools

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.gluon_here import (  # noqa: E402
    H100,
    assert_no_spills_in_a_loop,
    build,
    exponentials_during_a_product,
    needs_hopper,
)

from stepgauge.kernels.attention import (  # noqa: E402
    attention,
    flash_attention,
    heuristics,
    hopper_forward,
    hopper_launches,
    hopper_ops,
    launching,
)
from stepgauge.kernels.attention import triton as kernels  # noqa: E402

WIDTHS = tuple(hopper_forward.NUM_STAGES)
NARROWER = (40, 80, 120)  # than a tile


def key_of(q, k, *, is_causal=True, num_splits=None):
    return launching.launch_key(q, k, k, is_causal, 0.1, num_splits, o=torch.empty_like(q))


# ---- built ahead of time ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_hopper(hopper_driver, monkeypatch):
    monkeypatch.setattr(launching, "device_of", lambda index: H100)
    kernels._plan_forward.cache_clear()
    yield
    kernels._plan_forward.cache_clear()


def built(width, dtype=torch.bfloat16, is_causal=True):
    q, k = torch.empty(2, 16, 2000, width, dtype=dtype), torch.empty(2, 4, 300, width, dtype=dtype)
    launch = hopper_launches.forward_launch(key_of(q, k, is_causal=is_causal))
    return launch, build(launch, q, k, k, q, torch.empty(q.shape[:3]))


@pytest.mark.parametrize(
    "width, dtype, is_causal",
    [
        *((width, torch.bfloat16, True) for width in (*WIDTHS, 80)),
        (128, torch.bfloat16, False),
        (64, torch.float16, False),
    ],
)
def test_builds_without_spills_in_a_loop(on_hopper, width, dtype, is_causal, tmp_path):
    assert_no_spills_in_a_loop(built(width, dtype, is_causal)[1], tmp_path)


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_runs_beside_the_product(on_hopper, width, tmp_path):
    """All exponentials are between the wait for the scores and the wait for the output's product
    of a tile.
    """
    beside = exponentials_during_a_product(built(width)[1], tmp_path)
    assert len(beside) == 2 * hopper_ops.CONSUMERS.value  # with and without a mask
    assert min(beside) >= hopper_ops.ROWS.value * hopper_forward.BLOCK_N.value // 128


# ---- where it is taken -----------------------------------------------------------------------------------------------


def test_launch_covers_every_tile(on_hopper):
    q, k = (
        torch.empty(2, 16, 2000, 128, dtype=torch.bfloat16),
        torch.empty(2, 4, 300, 128, dtype=torch.bfloat16),
    )
    launch = kernels._plan_forward(key_of(q, k)).main
    assert launch.kernel is hopper_forward.forward_kernel and launch.grid == (132, 1, 1)
    schedule, *numbers = launch.scalars
    assert numbers[:5] == [16, 4, 2000, 300, 16]
    begins, tiles = schedule[:133].tolist(), schedule[133:-1].tolist()
    assert begins[0] == 133 and begins[-1] == 133 + len(tiles) and begins == sorted(begins)
    # heads of the batch times tiles of 128 queries
    assert sorted(tiles) == list(range(2 * 16 * 16))
    assert [box for _, _, box in launch.boxes] == [[1, 1, rows, 128] for rows in (64, 128, 128, 64)]
    few = torch.empty(1, 2, 300, 128, dtype=torch.bfloat16)
    assert hopper_launches.forward_launch(key_of(few, few)).grid == (2 * 3, 1, 1)


def test_schedule_is_cached_and_built_on_the_host():
    with torch.device("meta"):  # also with another default device
        made = hopper_launches._schedule(None, 2, 3, 3, (1, 2, 3))
    assert made.device.type == "cpu" and hopper_launches._schedule(None, 2, 3, 3, (1, 2, 3)) is made


def test_when_the_kernel_is_used(on_hopper, monkeypatch):
    def kernel_of(q, k=None, **options):
        kernels._plan_forward.cache_clear()
        return kernels._plan_forward(key_of(q, q if k is None else k, **options)).main.kernel

    q = torch.empty(4, 16, 512, 64, dtype=torch.bfloat16)
    for dtype, width in itertools.product(hopper_launches.DTYPES, WIDTHS):
        assert (
            kernel_of(torch.empty(4, 16, 512, width, dtype=dtype)) is hopper_forward.forward_kernel
        )
    together = torch.empty(4, 512, 3, 16, 64, dtype=torch.bfloat16)
    assert (
        kernel_of(*(x.transpose(1, 2) for x in together.unbind(2)[:2]))
        is hopper_forward.forward_kernel
    )
    one_head = torch.empty(1, 1, 8192, 64, dtype=torch.bfloat16)
    assert kernel_of(one_head) is kernels.forward_kernel  # in parts
    assert kernel_of(q[:2]) is kernels.forward_kernel  # 128 tiles for 132 multiprocessors
    odd = torch.empty(4, 16, 512, 68, dtype=torch.bfloat16)[..., 2:66]
    assert kernel_of(q, odd) is kernels.forward_kernel
    assert kernel_of(q.float()) is kernels.forward_kernel
    assert (
        kernel_of(torch.empty(4, 16, 512, 80, dtype=torch.bfloat16))
        is hopper_forward.forward_kernel
    )
    assert kernel_of(torch.empty(4, 16, 512, 32, dtype=torch.bfloat16)) is kernels.forward_kernel
    assert kernel_of(q, num_splits=1) is kernels.forward_kernel
    with heuristics.override_tiles(forward=heuristics.Tiles(64, 64, 4, 2)):
        assert kernel_of(q) is kernels.forward_kernel
    with monkeypatch.context() as patch:
        patch.setenv("STEPGAUGE_GLUON", "0")
        assert kernel_of(q) is kernels.forward_kernel
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "hopper", None)  # a Triton without Gluon
        assert kernel_of(q) is kernels.forward_kernel
    monkeypatch.setattr(launching, "device_of", lambda index: launching.Device(100, 148, 100 << 20))
    assert kernel_of(q) is kernels.forward_kernel


# ---- on the GPU ------------------------------------------------------------------------------------------------------

# batch, heads, key heads, queries, keys
CASES = [(1, 2, 2, 128, 128), (1, 1, 1, 1, 1), (2, 4, 2, 300, 300), (1, 2, 1, 65, 1000), (1, 2, 2, 1000, 65),
         (2, 16, 4, 2000, 2000)]  # fmt: skip


def make(batch, heads, kv_heads, queries, keys, width, dtype, layout="BHTD"):
    g = torch.Generator("cuda").manual_seed(queries + keys)
    made = []
    for h, t in ((heads, queries), (kv_heads, keys), (kv_heads, keys)):
        size = (batch, h, t, width) if layout == "BHTD" else (batch, t, h, width)
        x = torch.randn(size, generator=g, device="cuda").to(dtype)
        made.append(x if layout == "BHTD" else x.transpose(1, 2))
    return made


def forward(q, k, v, is_causal):
    """Runs this kernel, even if there are so few heads that the portable one would be used."""
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    case = launching.launch_key(q, k, v, is_causal, q.shape[-1] ** -0.5, None, o=o)
    launch, stream = hopper_launches.forward_launch(case), launching.stream_of(q)
    launch(stream, q, k, v, o, lse)  # by Triton's launcher
    yield o, lse
    for _ in range(10):
        o, lse = o.clone().fill_(float("nan")), lse.clone().fill_(float("nan"))
        launch(stream, q, k, v, o, lse)
        yield o, lse


def check(q, k, v, is_causal):
    group = q.shape[1] // k.shape[1]
    wide = [x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    want, want_lse = attention(*wide, is_causal=is_causal)
    (o, lse), *more = forward(q, k, v, is_causal)
    limit = 4e-3 if q.dtype == torch.bfloat16 else 8e-4
    rows = (o.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert (o.double() - want).norm() / want.norm() < limit and rows.max() < 4 * limit
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    for again, again_lse in more:
        assert torch.equal(o, again) and torch.equal(lse, again_lse)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", hopper_launches.DTYPES)
@pytest.mark.parametrize("width", (*WIDTHS, 80))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_equals_float64(case, width, dtype, is_causal, poisoned):
    check(*make(*case, width, dtype), is_causal)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", WIDTHS + NARROWER)
def test_gpu_views(width, poisoned):
    check(*make(2, 3, 3, 513, 511, width, torch.bfloat16, layout="BTHD"), True)
    fused = torch.randn(2, 640, 3, 4, width, device="cuda").bfloat16()
    check(*(part.transpose(1, 2) for part in fused.unbind(2)), True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", WIDTHS)
def test_gpu_attention_uses_it_and_differentiates(width, monkeypatch):
    """Compares with the portable kernel; both use the same backward."""
    q, k, v = (x.requires_grad_() for x in make(4, 16, 16, 512, 512, width, torch.bfloat16))

    def results():
        kernels._plan_forward.cache_clear()
        o = flash_attention(q, k, v, is_causal=True)
        return o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    launched = []
    launch = hopper_launches.forward_launch
    monkeypatch.setattr(
        hopper_launches, "forward_launch", lambda case: launched.append(case) or launch(case)
    )
    ours = results()
    assert len(launched) == 1
    monkeypatch.setenv("STEPGAUGE_GLUON", "0")
    portably = results()
    assert len(launched) == 1
    kernels._plan_forward.cache_clear()
    for got, want in zip(ours, portably, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2
