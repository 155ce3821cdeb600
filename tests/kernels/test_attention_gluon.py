"""The forward in Gluon: built for sm_90 without a GPU, and on one against float64."""

import functools
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs a Triton with Gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter runs no Gluon", allow_module_level=True)

from stepgauge.kernels.attention import attention, hopper, launching, plan  # noqa: E402

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


# ---- built ahead of time ---------------------------------------------------------------------------------------------


@functools.cache
def build(width, dtype="bf16", is_causal=True, shape=None):
    """The compiled kernel, with arguments as the launch gives them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    shape = shape or hopper.SHAPES[width]
    maxnreg, registers, producer_registers = shape.registers
    constants = {
        "IS_CAUSAL": is_causal, "CONSUMERS": shape.consumers, "STAGES": shape.stages,
        "Q_STAGES": shape.q_stages, "OVERLAP": shape.overlap, "TAKE_TURNS": shape.take_turns, "REGISTERS": registers,
        "PRODUCER_REGISTERS": producer_registers,
    }  # fmt: skip
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)"
    rows = {"q": 64, "k": shape.block_k, "v": shape.block_k, "o": 64}
    signature, attributes, values = {}, {}, {}
    for index, argument in enumerate(hopper.forward_kernel.arg_names):
        if argument in constants:
            signature[argument], values[(index,)] = "constexpr", constants[argument]
        elif argument in rows:
            signature[argument] = f"tensordesc<{dtype}[1,1,{rows[argument]},{width}],{layout}>"
        elif argument == "lse":
            signature[argument], attributes[(index,)] = "*fp32", [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument == "scale_log2" else "i32"
    source = GluonASTSource(hopper.forward_kernel, signature, values, attributes)
    options = {"num_warps": 4, "maxnreg": maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tool(name):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return path if path.exists() else pytest.skip(f"this Triton carries no {name}")


@pytest.mark.parametrize("width", hopper.WIDTHS)
@pytest.mark.parametrize("dtype, is_causal", [("bf16", True), ("bf16", False), ("fp16", True)])
def test_builds_without_spills_in_a_loop(width, dtype, is_causal, tmp_path):
    compiled = build(width, dtype, is_causal)
    assert compiled.metadata.shared <= 227 * 1024
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = [tool("ptxas"), "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    log = subprocess.run(command, capture_output=True, text=True, check=True)
    said = log.stdout + log.stderr
    assert "wgmma" not in said, said  # it would say that products are serialised
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 64, said  # of what a tile needs once


@pytest.mark.parametrize("width", hopper.WIDTHS)
def test_softmax_runs_beside_the_product(width, tmp_path):
    """Between the wait for the scores and the wait for the output's product stand all exponentials of a tile."""
    (tmp_path / "kernel.cubin").write_bytes(build(width).asm["cubin"])
    command = [tool("cuobjdump"), "-sass", tmp_path / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    beside = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", text, re.DOTALL)
    shape = hopper.SHAPES[width]
    assert len(beside) == 2 * shape.consumers  # with and without a mask
    for instructions in beside:
        assert instructions.count("MUFU.EX2") >= 64 * shape.block_k // 128


def test_registered_paths_name_this_forward(monkeypatch):
    monkeypatch.setattr(plan, "_PATHS", {})
    hopper.register()
    for dtype, width in itertools.product(DTYPES, hopper.WIDTHS):
        assert plan.find_path("forward", arch=90, dtype=dtype, head_width=width) is hopper.forward
    assert plan.find_path("forward", arch=100, dtype=torch.bfloat16, head_width=64) is None
    assert plan.find_path("backward", arch=90, dtype=torch.bfloat16, head_width=64) is None


def test_launch_covers_every_tile(monkeypatch):
    device = launching.Device(arch=90, num_sms=132, l2_bytes=50 << 20)
    monkeypatch.setattr(launching, "device_of", lambda index: device)
    hopper._plan.cache_clear()
    q, k = torch.empty(2, 16, 2000, 128, dtype=torch.bfloat16), torch.empty(2, 4, 300, 128, dtype=torch.bfloat16)
    case = launching.case_of(q, k, k, True, 0.1, None, o=q)
    shape = hopper.SHAPES[128]
    launch = hopper._plan(case, shape)
    total = 2 * 16 * 16  # heads of the batch times tiles of 128 queries
    assert (
        launch.grid == (132, 1, 1) and launch.scalars[:6] == (16, 32, 4, 2000, 300, 16) and launch.scalars[7] == total
    )
    assert [box for _, _, box in launch.boxes] == [[1, 1, rows, 128] for rows in (64, 128, 128, 64)]
    assert hopper._plan(case, shape._replace(persistent=False)).grid == (total, 1, 1)
    odd = torch.empty(2, 4, 300, 132, dtype=torch.bfloat16)[..., 2:130]
    assert hopper._plan(launching.case_of(q, odd, odd, True, 0.1, None, o=q), shape) is None
    hopper._plan.cache_clear()


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


def check(q, k, v, is_causal):
    group = q.shape[1] // k.shape[1]
    wide = [x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    want, want_lse = attention(*wide, is_causal=is_causal)
    for like in (q, want_lse.float()):  # freed memory of these sizes, which a result is likely to get, holds NaN
        torch.full_like(like, float("nan"))
    o, lse = hopper.forward(q, k, v, is_causal, q.shape[-1] ** -0.5, shape=hopper.SHAPES[q.shape[-1]])
    limit = 4e-3 if q.dtype == torch.bfloat16 else 8e-4
    rows = (o.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert (o.double() - want).norm() / want.norm() < limit and rows.max() < 4 * limit
    assert o.stride() == q.stride() and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    for _ in range(10):
        again, again_lse = hopper.forward(q, k, v, is_causal, q.shape[-1] ** -0.5, shape=hopper.SHAPES[q.shape[-1]])
        assert torch.equal(o, again) and torch.equal(lse, again_lse)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", hopper.WIDTHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_against_float64(case, width, dtype, is_causal):
    check(*make(*case, width, dtype), is_causal)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", hopper.WIDTHS)
def test_forward_of_views(width):
    check(*make(2, 3, 3, 513, 511, width, torch.bfloat16, layout="BTHD"), True)
    fused = torch.randn(2, 640, 3, 4, width, device="cuda").bfloat16()
    check(*(part.transpose(1, 2) for part in fused.unbind(2)), True)
    odd = torch.randn(1, 2, 100, width + 4, device="cuda").bfloat16()[..., 2 : width + 2]  # by pointers, portably
    check(odd.contiguous(), odd, odd, True)


@pytest.mark.gpu
@needs_hopper
def test_path_is_taken_and_differentiates(monkeypatch):
    from stepgauge.kernels.attention import flash_attention

    q, k, v = make(4, 16, 16, 512, 512, 64, torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    portably = flash_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(portably, leaves, torch.ones_like(portably))
    calls = []
    monkeypatch.setattr(plan, "_PATHS", {})
    counting = lambda *args: calls.append(1) or hopper.forward(*args)  # noqa: E731
    plan.register_path("forward", counting, arch=90, dtype=torch.bfloat16, head_width=64)
    o = flash_attention(*leaves, is_causal=True)
    ours = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert calls == [1]
    for got, want in zip((o, *ours), (portably, *grads), strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2
