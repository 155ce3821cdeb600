"""The float32 backward with operands that are split once: against float64 in the interpreter and on
a GPU, and compiled ahead of time.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.kernels.test_attention import (  # noqa: E402
    HOPPER,
    INTERPRETER_CASES,
    cancelling_scales,
    float64_reference,
    make,
    relative,
    run_both_ways,
)
from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    resources_of,
)

from stepgauge.kernels.attention import bf16x3, heuristics, launching, tile_ops  # noqa: E402
from stepgauge.kernels.attention import triton as kernels  # noqa: E402


def key_of(
    shape=(2, 4, 300, 128),
    kv_heads=2,
    *,
    dtype=torch.float32,
    precision="ieee",
    num_splits=None,
    overrides=(),
):
    def view(heads):
        return launching.View.of(torch.empty(shape[0], heads, *shape[2:], device="meta"))

    q, k = view(shape[1]), view(kv_heads)
    return launching.LaunchKey(0, dtype, q, k, k, True, 0.1, precision, overrides, num_splits, q, q)


# ---- which calls take it ---------------------------------------------------------------------------------------------


@compiled_only
def test_float32_backwards_on_hopper_use_it(monkeypatch):
    monkeypatch.setattr(launching, "device_of", lambda index: HOPPER)
    tiles = heuristics.Tiles(32, 32, 4, 1)
    assert bf16x3.takes(key_of()) and bf16x3.takes(key_of((1, 2, 70, 64), 1, num_splits=3))
    assert bf16x3.takes(key_of(overrides=(("dq_bf16x3", tiles),)))
    assert not bf16x3.takes(key_of(overrides=(("dq", tiles),)))
    assert not bf16x3.takes(key_of(precision="tf32"))
    assert not bf16x3.takes(key_of(dtype=torch.bfloat16))
    assert not bf16x3.takes(key_of((2, 4, 300, 80)))
    monkeypatch.setenv(bf16x3.OPT_OUT, "0")
    assert not bf16x3.takes(key_of())
    monkeypatch.delenv(bf16x3.OPT_OUT)
    monkeypatch.setattr(launching, "device_of", lambda index: HOPPER._replace(arch=100))
    assert not bf16x3.takes(key_of())


@compiled_only
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("width", bf16x3.WIDTHS)
def test_launches_give_every_argument_in_order(width, num_splits, monkeypatch):
    monkeypatch.setattr(launching, "device_of", lambda index: HOPPER)
    key = key_of((2, 4, 300, width), num_splits=num_splits)
    steps = key.q.steps
    dq, dkdv = kernels._plan_dq(key, steps), kernels._plan_dkdv(key, steps, steps)
    assert dq.main.kernel is bf16x3.dq_kernel and all(
        each.kernel is bf16x3.dkdv_kernel for each in dkdv.mains
    )
    assert sum(each.constants["GRADS"] for each in dkdv.mains) == 3  # 1 is dv, 2 is dk
    launches = [(bf16x3.cut_launch(key), 10), (dq.main, 8), *((each, 8) for each in dkdv.mains)]
    for launch, num_tensors in launches:
        names = list(launch.kernel.arg_names)
        assert num_tensors + len(launch.scalars) + len(launch.constants) == len(names)
        assert list(launch.constants) == names[num_tensors + len(launch.scalars) :]


@compiled_only
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", bf16x3.WIDTHS)
@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
def test_one_head_is_split_and_a_full_chip_is_not(kernel, width, is_causal):
    tiles = heuristics.select_tiles(f"{kernel}_bf16x3", arch=90, itemsize=4, head_width=width)
    shape = {
        "num_queries": 4096,
        "num_keys": 4096,
        "head_width": width,
        "itemsize": 4,
        "num_sms": 132,
    }
    assert (
        heuristics.choose_num_splits(kernel, tiles, num_heads=1, is_causal=is_causal, **shape) >= 2
    )
    assert (
        heuristics.choose_num_splits(kernel, tiles, num_heads=64, is_causal=is_causal, **shape) == 1
    )


# ---- in the interpreter ----------------------------------------------------------------------------------------------


@interpreted_only
def test_interp_parts_sum_to_the_number(interpreter, poisoned):
    q, k, v, do = make((2, 3, 70, 32), (2, 3, 90, 32))
    q = q * torch.logspace(-20, 20, 70)[:, None]
    o, delta = torch.randn_like(q), torch.empty(q.shape[:3])
    key = launching.launch_key(q, k, v, True, 0.1, None, o=o, do=do)
    for whole, cut in zip((q, k, v, do), bf16x3.cut(key, q, k, v, do, o, delta), strict=True):
        assert cut.dtype == torch.bfloat16 and cut.shape == (3, 6, *whole.shape[2:])
        assert torch.equal(cut.double().sum(0).view(whole.shape), whole.double())
    torch.testing.assert_close(
        delta.double(), (o.double() * do.double()).sum(-1), rtol=1e-5, atol=1e-5 * o.abs().max()
    )


@interpreted_only
@pytest.mark.parametrize("case", [INTERPRETER_CASES[i] for i in (1, 4, 5, 9, 11, 13)], ids=str)
def test_interp_backward_equals_float64(interpreter, poisoned, case, monkeypatch):
    heads, kv_heads, t_q, t_k, d, is_causal, splits, (block_q, block_k) = case
    q, k, v, grad_o = make(
        (1, heads, t_q, heuristics.block_width(d)), (1, kv_heads, t_k, heuristics.block_width(d))
    )
    taken = []
    monkeypatch.setattr(bf16x3, "takes", lambda key: taken.append(key) or True)
    tiles = heuristics.Tiles(block_q, block_k, 4, 1)
    with heuristics.override_tiles(dq_bf16x3=tiles, dkdv_bf16x3=tiles):
        got = run_both_ways(q, k, v, grad_o, is_causal, num_splits=splits)
    assert taken
    expected, scales = (
        float64_reference(q, k, v, grad_o, is_causal),
        cancelling_scales(q, k, v, grad_o, is_causal),
    )
    for value, want, scale in zip(got, expected, scales, strict=True):
        assert relative(value, want, scale) < 5e-6
        assert value.dtype == torch.float32


@interpreted_only
def test_interp_separate_launches_for_dk_and_dv_equal_one(interpreter, poisoned, monkeypatch):
    q, k, v, grad_o = make((1, 2, 40, 16), (1, 1, 50, 16))
    monkeypatch.setattr(bf16x3, "takes", lambda key: True)
    tiles = heuristics.Tiles(16, 32, 4, 1)
    with heuristics.override_tiles(dkdv_bf16x3=tiles):
        together = run_both_ways(q, k, v, grad_o, True, num_splits=2)
    monkeypatch.setitem(bf16x3._GRADS, 16, (1, 2))
    # other tiles, so that the cached plan is not used
    with heuristics.override_tiles(dkdv_bf16x3=heuristics.Tiles(16, 32, 4, 2)):
        apart = run_both_ways(q, k, v, grad_o, True, num_splits=2)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


# ---- compiled ahead of time ------------------------------------------------------------------------------------------


def build(kernel, tiles, constants):
    """Compiles the kernel for sm_90, with parts as descriptors and all other tensors in float32."""
    width = constants["D"]
    rows = {"q3": tiles.block_q, "do3": tiles.block_q, "k3": tiles.block_k, "v3": tiles.block_k}
    tensors = {"q", "k", "v", "do", "o", "unused", "lse", "delta", "dq", "dk", "dv"}
    signature, aligned = {}, []
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in rows and kernel is not bf16x3.cut_kernel:
            signature[name] = f"tensordesc<bf16[1,1,{rows[name]},{width}]>"
            continue
        number = "fp32" if name in ("scale", "scale_log2") else "i32"
        signature[name] = "*bf16" if name in rows else "*fp32" if name in tensors else number
        if signature[name].startswith("*") or (
            number == "i32" and name not in (*tile_ops._COUNTS, "num_kv_heads")
        ):
            aligned.append(name)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_ahead(kernel, 90, signature, constants, aligned=aligned, options=options)


@compiled_only
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", bf16x3.WIDTHS)
@pytest.mark.parametrize("name", ["dq", "dkdv"])
def test_nothing_spills_on_hopper(name, width, is_causal):
    tiles = heuristics.select_tiles(f"{name}_bf16x3", arch=90, itemsize=4, head_width=width)
    kernel = {"dq": bf16x3.dq_kernel, "dkdv": bf16x3.dkdv_kernel}[name]
    constants = {
        "IS_CAUSAL": is_causal, "HAS_TAIL": True, "SPLIT": is_causal, "GROUP": 2, "D": width,
        "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k, "USE_TMA": True, "THREADS": 32 * tiles.num_warps,
    }  # fmt: skip
    for grads in bf16x3._GRADS[width] if name == "dkdv" else (0,):
        compiled = build(kernel, tiles, constants | {"GRADS": grads})
        used, text = resources_of(compiled), compiled.asm["ptx"]
        assert used["stack"] == 0
        assert compiled.metadata.shared * tiles.programs_per_sm <= 227 * 1024
        assert used["registers"] * 32 * tiles.num_warps * tiles.programs_per_sm <= 65536
        assert (
            ".f32.bf16.bf16" in text
            and "cp.async.bulk.tensor" in text
            and "mma.sync.aligned.m16" not in text
        )


@compiled_only
@pytest.mark.parametrize("width", bf16x3.WIDTHS)
def test_cut_kernel_builds_ahead_of_time(width):
    compiled = build(
        bf16x3.cut_kernel, heuristics.Tiles(64, 64, 4, 3), {"D": width, "BLOCK": bf16x3._BLOCK}
    )
    assert resources_of(compiled)["stack"] == 0 and "st.global.v4" in compiled.asm["ptx"]


# ---- on a GPU --------------------------------------------------------------------------------------------------------

GPU_CASES = [
    # batch, heads, key heads, T_q, T_k, D, causal, splits
    (8, 1, 1, 1024, 1024, 128, True, None),
    (2, 4, 4, 1111, 1333, 128, False, None),
    (2, 8, 2, 777, 777, 128, True, None),
    (1, 1, 1, 4096, 4096, 128, True, None),
    (1, 1, 1, 2100, 4000, 128, True, 7),
    (1, 2, 1, 65, 1, 128, True, None),
    (2, 4, 4, 1024, 1024, 64, False, None),
    (2, 8, 2, 1333, 1111, 64, True, None),
    (1, 1, 1, 4096, 4096, 64, True, None),
    (1, 1, 1, 2100, 4000, 64, False, 3),
]


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def test_grids_are_legal_for_long_sequences():
    """CUDA allows at most 65,535 blocks in y and z."""
    q, k = (torch.empty(1, 1, 1, 64).expand(1, 1, length, 64) for length in (128, 5_000_000))
    key = launching.launch_key(q, k, k, True, 0.125, None, o=q, do=q)
    assert bf16x3.cut_launch(key).grid == (-(-5_000_000 // bf16x3._BLOCK), 4, 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_backward_equals_float64(case, poisoned):
    needs_hopper()
    batch, heads, kv_heads, t_q, t_k, d, is_causal, splits = case
    tensors = make((batch, t_q, heads, d), (batch, t_k, kv_heads, d), torch.float32, "cuda")
    q, k, v, grad_o = (x.transpose(1, 2) for x in tensors)  # as a projection leaves them
    assert bf16x3.takes(launching.launch_key(q, k, v, is_causal, 0.1, splits, o=q, do=grad_o))
    expected, scales = (
        float64_reference(q, k, v, grad_o, is_causal),
        cancelling_scales(q, k, v, grad_o, is_causal),
    )
    first = run_both_ways(q, k, v, grad_o, is_causal, num_splits=splits)
    for value, want, scale in zip(first, expected, scales, strict=True):
        assert relative(value, want, scale) < 5e-6
    again = run_both_ways(q, k, v, grad_o, is_causal, num_splits=splits)  # by the cached launch
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("d", bf16x3.WIDTHS)
def test_gpu_long_loops_keep_float32s_error(d):
    """The tensor cores' own sums truncate: over a loop of 4096 rows they would lose more than
    float32 does.
    """
    needs_hopper()
    q, k, v, grad_o = make((2, 4, 4096, d), (2, 4, 4096, d), torch.float32, "cuda")
    got = run_both_ways(q, k, v, grad_o, False, num_splits=1)
    for value, want in zip(got, float64_reference(q, k, v, grad_o, False), strict=True):
        assert relative(value, want) < 2e-6
