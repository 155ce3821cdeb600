"""The backward in Gluon: compiled for sm_90 without a GPU, when it is used, and its results on a
GPU.
"""

import itertools
from types import SimpleNamespace

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
    hopper_dkdv,
    hopper_dq,
    hopper_launches,
    hopper_ops,
    launching,
)
from stepgauge.kernels.attention import triton as kernels  # noqa: E402

WIDTHS = tuple(hopper_dkdv.DKDV_STAGES)
NARROWER = (40, 80, 120)  # than a tile
KERNELS = [("dq", width) for width in hopper_dq.DQ_STAGES] + [("dkdv", width) for width in WIDTHS]
GLUON = {"dq": hopper_dq.dq_kernel, "dkdv": hopper_dkdv.dkdv_kernel}
BF16 = torch.bfloat16


def key_of(q, k, do=None, *, is_causal=True, num_splits=None):
    do = q if do is None else do
    return launching.launch_key(
        q, k, k, is_causal, q.shape[-1] ** -0.5, num_splits, o=torch.empty_like(q), do=do
    )


@pytest.fixture(autouse=True)
def planned_anew():
    clear_plans()
    yield
    clear_plans()


def clear_plans():
    for cached in (kernels._plan_dq, kernels._plan_dkdv):
        cached.cache_clear()


# ---- built ahead of time ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_hopper(hopper_driver, monkeypatch):
    monkeypatch.setattr(launching, "device_of", lambda index: H100)


def built(name, width, dtype=BF16, is_causal=True):
    q, k = torch.empty(2, 16, 2000, width, dtype=dtype), torch.empty(2, 4, 300, width, dtype=dtype)
    key, row, view = (
        key_of(q, k, is_causal=is_causal),
        torch.empty(q.shape[:3]),
        launching.View.of,
    )
    if name == "dq":
        launch = hopper_launches.dq_launch(key, view(q))
        return launch, build(launch, q, k, k, q, q, row, row, q)
    launch = hopper_launches.dkdv_launch(key, view(k), view(k))
    return launch, build(launch, q, k, k, q, row, row, k, k)


@pytest.mark.parametrize(
    "name, width, dtype, is_causal",
    [
        *((name, width, BF16, True) for name, width in [*KERNELS, ("dq", 80)]),
        ("dkdv", 128, BF16, False),
        ("dkdv", 64, torch.float16, False),
    ],
)
def test_builds_without_spills_in_a_loop(on_hopper, name, width, dtype, is_causal, tmp_path):
    assert_no_spills_in_a_loop(built(name, width, dtype, is_causal)[1], tmp_path)


@pytest.mark.parametrize("name, width", KERNELS)
def test_exponentials_run_beside_the_product(on_hopper, name, width, tmp_path):
    """While dP's product is under way, after the wait for the scores, stand all exponentials of a
    tile.
    """
    loops = 2 * hopper_ops.CONSUMERS.value  # with and without a mask
    a_thread = hopper_ops.ROWS.value * hopper_dq.BLOCK.value // 128
    assert exponentials_during_a_product(built(name, width)[1], tmp_path) == [a_thread] * loops


# ---- where it is taken -----------------------------------------------------------------------------------------------


def test_launches_cover_every_tile(on_hopper):
    q, k = torch.empty(2, 16, 2000, 128, dtype=BF16), torch.empty(2, 40, 300, 128, dtype=BF16)
    launch = kernels._plan_dq(key_of(q, k[:, :4]), q.stride()[:3]).main
    total = 2 * 16 * 16  # heads of the batch times tiles of 128 queries
    assert launch.kernel is hopper_dq.dq_kernel and launch.grid == (total, 1, 1)
    assert launch.scalars[:9] == (*q.stride()[:3], 16, 4, 2000, 300, 16, 32)
    assert [(at, box[2]) for at, _, box in launch.boxes] == [
        (0, 64),
        (1, 64),
        (2, 64),
        (3, 64),
        (7, 64),
    ]
    many = torch.empty(2, 80, 2000, 128, dtype=BF16)
    launch = kernels._plan_dkdv(key_of(many, k), k.stride()[:3], k.stride()[:3]).main
    total = 2 * 40 * 3  # key heads times tiles of 128 keys
    assert launch.kernel is hopper_dkdv.dkdv_kernel and launch.grid == (132, 1, 1)
    schedule, *numbers = launch.scalars
    assert numbers[:5] == [40, 2, 2000, 300, 3] and sorted(schedule[133:-1].tolist()) == list(
        range(total)
    )
    assert [at for at, _, _ in launch.boxes] == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("num_tiles, heads, section", [(1, 1, 1), (5, 7, 3), (4, 6, 100)])
def test_programs_of_dq_have_every_tile(num_tiles, heads, section, monkeypatch):
    program = iter(range(num_tiles * heads))
    monkeypatch.setattr(
        hopper_dq, "gl", SimpleNamespace(minimum=min, program_id=lambda axis: next(program))
    )
    numbers = [
        hopper_dq._number.fn(heads, num_tiles, section, True) for _ in range(num_tiles * heads)
    ]
    assert sorted(numbers) == list(range(num_tiles * heads))
    assert [number % num_tiles for number in numbers[: min(section, heads)]] == [
        num_tiles - 1
    ] * min(section, heads)


@pytest.mark.parametrize("name, width", KERNELS)
def test_constants_come_in_the_kernels_order(on_hopper, name, width):
    """Launches after the first pass all arguments by position."""
    launch, _ = built(name, width)
    names = launch.kernel.arg_names
    assert names[len(names) - len(launch.constants) :] == list(launch.constants)
    addresses = 8  # dq: q, k, v, do, o, lse, delta, dq; dkdv: q, k, v, do, lse, delta, dk, dv
    assert len(names) == addresses + len(launch.tail)


def test_when_the_kernels_are_used(on_hopper, monkeypatch):
    def in_gluon(q, k=None, do=None, **options):
        clear_plans()
        k = q if k is None else k
        key = key_of(q, k, do, **options)
        dq = kernels._plan_dq(key, torch.empty_like(q).stride()[:3])
        dkdv = kernels._plan_dkdv(key, *[torch.empty_like(k).stride()[:3]] * 2)
        return {
            name for name, step in (("dq", dq), ("dkdv", dkdv)) if step.main.kernel is GLUON[name]
        }

    q = torch.empty(4, 16, 512, 128, dtype=BF16)
    for dtype in hopper_launches.DTYPES:
        assert in_gluon(q.to(dtype)) == {"dq", "dkdv"}
        # dq is not faster there
        assert in_gluon(torch.empty(4, 16, 512, 64, dtype=dtype)) == {"dkdv"}
    together = torch.empty(4, 512, 3, 16, 128, dtype=BF16)
    assert in_gluon(*(x.transpose(1, 2) for x in together.unbind(2)[:2])) == {"dq", "dkdv"}
    assert in_gluon(q, q[:, :2]) == {"dq"}  # 32 tiles of keys for 132 multiprocessors
    assert in_gluon(torch.empty(1, 1, 8192, 128, dtype=BF16)) == set()  # in parts
    odd = torch.empty(4, 16, 512, 132, dtype=BF16)[..., 2:130]
    summed = torch.empty(1, dtype=BF16).expand(4, 16, 512, 128)  # a gradient as o.sum() gives it
    assert in_gluon(q, odd) == in_gluon(q, do=summed) == set()
    assert in_gluon(q.float()) == in_gluon(q, num_splits=1) == in_gluon(q[:2]) == set()
    assert in_gluon(torch.empty(4, 16, 512, 80, dtype=BF16)) == {"dq", "dkdv"}
    assert in_gluon(torch.empty(4, 16, 512, 32, dtype=BF16)) == set()
    with heuristics.override_tiles(dq=heuristics.Tiles(64, 64, 4, 2)):
        assert in_gluon(q) == set()
    with monkeypatch.context() as patch:
        patch.setenv(hopper_launches.OPT_OUT, "0")
        assert in_gluon(q) == set()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "hopper", None)  # a Triton without Gluon
        assert in_gluon(q) == set()
    monkeypatch.setattr(launching, "device_of", lambda index: launching.Device(100, 148, 100 << 20))
    assert in_gluon(q) == set()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "num_queries, num_keys", [(1, 1), (300, 300), (64, 1000), (1000, 65), (129, 700), (512, 512)]
)
@pytest.mark.parametrize("group", [1, 3])
def test_tiles_of_queries_that_a_tile_of_keys_visits(
    num_queries, num_keys, is_causal, group, monkeypatch
):
    """By the kernels' own arithmetic in Python: every visible score once, and none invisible
    without a mask.
    """
    cdiv = lambda a, b: -(-a // b)  # noqa: E731
    q, k = torch.empty(1, 2 * group, num_queries, 64), torch.empty(1, 2, num_keys, 64)
    seen = hopper_launches._query_tiles_seen(key_of(q, k, is_causal=is_causal))
    python = SimpleNamespace(
        minimum=min, maximum=max, cdiv=cdiv, where=lambda c, x, y: x if c else y
    )
    monkeypatch.setattr(hopper_dkdv, "gl", python)
    for name, value in (("TILE_ROWS", 128), ("BLOCK", 64)):
        monkeypatch.setattr(hopper_dkdv, name, value)
    num_tiles, heads = cdiv(num_keys, 128), 4
    sizes = (2, num_queries, num_keys, num_tiles)
    visited = set()
    for number in range(num_tiles * heads):
        b, kv_h, col, first, masked, whole = hopper_dkdv._place_keys.fn(number, sizes, is_causal)
        assert masked + whole >= 1  # or nothing would copy the keys
        assert masked + whole == seen[number % num_tiles]
        for step in range((masked + whole) * group):
            in_group, tile = hopper_dkdv._query_tile.fn(step, first, masked, whole, group)
            assert (b, kv_h, col, in_group, tile) not in visited and 0 <= tile * 64 < num_queries
            visited.add((b, kv_h, col, in_group, tile))
            if is_causal and step >= masked * group:
                assert tile * 64 >= col + 127
            elif is_causal:  # the row that the consumers' mask counts from
                assert first + step % masked == tile
    needed = itertools.product(
        range(2), range(2), range(0, num_keys, 128), range(group), range(cdiv(num_queries, 64))
    )
    for b, kv_h, col, in_group, tile in needed:
        assert (b, kv_h, col, in_group, tile) in visited or (is_causal and (tile + 1) * 64 <= col)


# ---- on the GPU ------------------------------------------------------------------------------------------------------

# batch, heads, key heads, queries, keys
CASES = [(1, 2, 2, 128, 128), (1, 1, 1, 1, 1), (2, 4, 2, 300, 300), (1, 2, 1, 65, 1000), (1, 2, 2, 1000, 65),
         (1, 16, 4, 2000, 2000), (1, 3, 1, 100, 700)]  # fmt: skip
LIMITS = {BF16: 1e-2, torch.float16: 2e-3}


def make(batch, heads, kv_heads, queries, keys, width, dtype, layout="BHTD"):
    g = torch.Generator("cuda").manual_seed(queries + keys)
    made = []
    for h, t in ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)):
        size = (batch, h, t, width) if layout == "BHTD" else (batch, t, h, width)
        x = torch.randn(size, generator=g, device="cuda").to(dtype)
        made.append(x if layout == "BHTD" else x.transpose(1, 2))
    return made


def cancelling_scales(q, k, v, do, is_causal):
    """dS = P (dP - delta) is zero for a query that sees one key: errors of dq, dk are held against
    P dP's alone.
    """
    scores = q.shape[-1] ** -0.5 * (q @ k.mT)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    terms = q.shape[-1] ** -0.5 * scores.softmax(-1) * (do @ v.mT)
    return (terms @ k).norm(), (terms.mT @ q).norm(), torch.zeros((), device=q.device)


@pytest.fixture
def of_any_size(monkeypatch):
    """Uses the Gluon kernels even if there are too few tiles, or if loops would be split."""
    monkeypatch.setattr(hopper_launches, "fills_chip", lambda key, owned: True)
    monkeypatch.setattr(heuristics, "choose_num_splits", lambda *args, **options: 1)


def check(q, k, v, do, is_causal, names=("dq", "dkdv")):
    """Compares with float64, and checks which kernels run and that results are bitwise equal."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])]
    o, lse = attention(*wide, is_causal=is_causal)
    want = torch.autograd.grad(o, leaves, do.double())
    scales = cancelling_scales(*(x.detach() for x in wide), do.double(), is_causal)
    o, lse = torch.empty_like(q).copy_(o.detach()), lse.detach().float()
    run = lambda: kernels.backward(do, q, k, v, o, lse, is_causal, q.shape[-1] ** -0.5)  # noqa: E731
    grads = run()
    assert names_of_gluon(q, k, v, do, o, is_causal) == set(names)
    for got, wanted, scale in zip(grads, want, scales, strict=True):
        assert (got.double() - wanted).norm() < LIMITS[q.dtype] * max(wanted.norm(), scale)
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(grads, run(), strict=True))


def names_of_gluon(q, k, v, do, o, is_causal):
    key = launching.launch_key(q, k, v, is_causal, q.shape[-1] ** -0.5, None, o=o, do=do)
    steps = [torch.empty_like(x).stride()[:3] for x in (q, k, v)]
    planned = {
        "dq": kernels._plan_dq(key, steps[0]),
        "dkdv": kernels._plan_dkdv(key, *steps[1:]),
    }
    return {name for name, step in planned.items() if step.main.kernel is GLUON[name]}


def expected(width):
    return tuple(name for name, each in KERNELS if each == heuristics.block_width(width))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", hopper_launches.DTYPES)
@pytest.mark.parametrize("width", (*WIDTHS, 80))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_equals_float64(case, width, dtype, is_causal, poisoned, of_any_size):
    check(*make(*case, width, dtype), is_causal, expected(width))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", WIDTHS + NARROWER)
def test_gpu_views(width, poisoned, of_any_size):
    check(*make(2, 3, 3, 513, 511, width, BF16, layout="BTHD"), True, expected(width))
    fused = torch.randn(2, 640, 4, 4, width, device="cuda").bfloat16()
    check(*(part.transpose(1, 2) for part in fused.unbind(2)), True, expected(width))
    odd = torch.randn(1, 2, 100, width + 4, device="cuda").bfloat16()[..., 2 : width + 2]
    check(odd.contiguous(), odd, odd, odd.contiguous(), True, ())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", WIDTHS)
def test_gpu_attention_uses_them(width, monkeypatch):
    """Compares with the portable kernels after the same forward."""
    q, k, v, do = make(4, 16, 16, 512, 512, width, BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = flash_attention(*leaves, is_causal=True)
    launched = []
    for name in ("dq_launch", "dkdv_launch"):
        launch = getattr(hopper_launches, name)
        noting = lambda *args, launch=launch, name=name: launched.append(name) or launch(*args)  # noqa: E731
        monkeypatch.setattr(hopper_launches, name, noting)
    ours = torch.autograd.grad(o, leaves, do, retain_graph=True)
    assert launched == [f"{name}_launch" for name in expected(width)]
    monkeypatch.setenv(hopper_launches.OPT_OUT, "0")
    clear_plans()
    portably = torch.autograd.grad(o, leaves, do)
    assert len(launched) == len(expected(width))
    for got, want in zip(ours, portably, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2
