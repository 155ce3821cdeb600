"""Attention with a sliding window, and within packed sequences.

The kernels run in Triton's interpreter (in a separate process) and are compiled ahead of time.
"""

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.test_attention import build, relative  # noqa: E402
from tests.kernels.triton_here import (  # noqa: E402
    HAS_TRITON,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
)

from stepgauge.kernels.attention import (  # noqa: E402
    attention,
    flash_attention,
    flash_attention_varlen,
    heuristics,
)
from stepgauge.kernels.attention.visible import num_pairs, spans_of, visible  # noqa: E402
from stepgauge.models.parts import ATTENTIONS, WINDOWED  # noqa: E402

if HAS_TRITON:
    from stepgauge.kernels.attention import triton as kernels

# heads, key heads, T_q, T_k, window, (ends of sequences), causal
CASES = [
    (2, 1, 40, 40, 10, None, True),
    (1, 1, 60, 50, 12, None, False),
    (1, 1, 20, 60, 1, None, True),
    (1, 1, 48, 48, 30, None, True),
    (1, 1, 60, 60, 0, (30, 35, 35, 50), True),
    (1, 1, 40, 40, 10, (5, 30), False),
]


def made(heads, kv_heads, t_q, t_k, dtype=torch.float32, device="cpu", width=16):
    generator = torch.Generator().manual_seed(t_q)
    shapes = [(1, n, t, width) for n, t in ((heads, t_q), (kv_heads, t_k), (kv_heads, t_k))]
    shapes.append(shapes[0])
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def packed(ends, device="cpu"):
    return None if ends is None else torch.tensor((0, *ends), device=device, dtype=torch.int32)


def seen_by(t_q, t_k, is_causal, window, cu_seqlens):
    spans = None if cu_seqlens is None else spans_of(cu_seqlens, t_q)
    return visible(torch.arange(t_q), torch.arange(t_k), is_causal, window, spans)


def expected_of(q, k, v, grad_o, is_causal, window, cu_seqlens):
    """(o, lse, dq, dk, dv) in float64 by the oracle."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    wide = [leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])]
    o, lse = attention(*wide, is_causal=is_causal, window=window, cu_seqlens=cu_seqlens)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, grad_o.double())]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_oracle_masks_as_documented(case):
    *_, t_q, t_k, window, ends, is_causal = case
    cu_seqlens = packed(ends)
    seen = seen_by(t_q, t_k, is_causal, window, cu_seqlens)
    sequence = [sum(i >= end for end in ends or ()) for i in range(max(t_q, t_k))]
    for i in range(t_q):
        for j in range(t_k):
            near = not window or abs(i - j) < window
            after = is_causal and j > i
            assert seen[i, j] == (near and not after and sequence[i] == sequence[j])
    if window:
        assert num_pairs(t_q, t_k, is_causal, window, cu_seqlens) == seen.sum()


def test_plain_pytorch_equals_the_oracle():
    for heads, kv_heads, t_q, t_k, window, ends, is_causal in (CASES[1], *CASES[4:]):
        q, k, v, grad_o = made(heads, kv_heads, 4 * t_q, 4 * t_k, torch.float64)
        cu_seqlens = packed(ends)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if ends is None:
            o = flash_attention(*leaves, is_causal=is_causal, window=4 * window)
        else:
            in_a_row = (x[0].transpose(0, 1) for x in leaves)
            o = flash_attention_varlen(
                *in_a_row, cu_seqlens, is_causal=is_causal, window=4 * window
            ).transpose(0, 1)[None]
        got = o, *torch.autograd.grad(o, leaves, grad_o)
        wanted = expected_of(q, k, v, grad_o, is_causal, 4 * window, cu_seqlens)
        for value, want in zip(got, (wanted[0], *wanted[2:]), strict=True):
            torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attentions_of_models_agree_on_windows(is_causal):
    q, k, v, _ = made(4, 2, 40, 40, torch.float64)
    first, *others = [ATTENTIONS[name](q, k, v, is_causal=is_causal, window=7) for name in WINDOWED]
    for other in others:
        torch.testing.assert_close(first, other)


def test_refuses():
    q, k, v, _ = made(1, 1, 20, 10)
    with pytest.raises(ValueError, match="sees none"):
        flash_attention(q, k, v, is_causal=True, window=10)
    with pytest.raises(ValueError, match="window -1"):
        flash_attention(q, k, v, window=-1)
    q = q[0].transpose(0, 1)
    for numbers in ([1, 20], [0, 9, 5], [0, 21]):
        with pytest.raises(ValueError, match="do not decrease"):
            flash_attention_varlen(q, q, q, torch.tensor(numbers))
    with pytest.raises(ValueError, match="at least 2"):
        flash_attention_varlen(q, q, q, torch.tensor([0]))
    with pytest.raises(ValueError, match="float32"):
        flash_attention_varlen(q, q, q, torch.tensor([0.0, 20.0]))
    with pytest.raises(ValueError, match="with the same T"):
        flash_attention_varlen(q, q[:5], q[:5], torch.tensor([0, 5]))


@needs_triton
@compiled_only
def test_flops_count_visible_pairs():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.empty(1, h, 100, 16, device="meta", requires_grad=True) for h in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        o = flash_attention(q, k, v, is_causal=True, window=10)
        forward = counter.get_total_flops()
        o.sum().backward()
    pairs = 100 * 10 - 45
    assert (forward, counter.get_total_flops()) == (4 * 4 * 16 * pairs, 14 * 4 * 16 * pairs)


# ---- the kernels -----------------------------------------------------------------------------------------------------


def run_kernels(q, k, v, grad_o, is_causal, window, cu_seqlens):
    scale = q.shape[-1] ** -0.5
    o, lse = kernels.forward(q, k, v, is_causal, scale, window, cu_seqlens)
    grads = kernels.backward(grad_o, q, k, v, o, lse, is_causal, scale, window, cu_seqlens)
    return o, lse, *grads


def visited_tiles(seen, block_q, block_k):
    """Returns the number of tiles with a visible pair, and the number of all tiles."""
    rows, cols = (-(-n // block) for n, block in zip(seen.shape, (block_q, block_k), strict=True))
    seen = torch.nn.functional.pad(
        seen, (0, cols * block_k - seen.shape[1], 0, rows * block_q - seen.shape[0])
    )
    return int(seen.unflatten(0, (rows, -1)).unflatten(2, (cols, -1)).any(3).any(1).sum())


@needs_triton
@interpreted_only
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interp_equals_float64_and_visits_no_other_tile(interpreter, poisoned, case, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    products, create_dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: products.append(1) or create_dot(*args)
    )
    heads, kv_heads, t_q, t_k, window, ends, is_causal = case
    cu_seqlens = packed(ends)
    tensors = made(heads, kv_heads, t_q, t_k)
    block_q, block_k = (16, 32) if is_causal else (32, 16)
    tiles = heuristics.Tiles(block_q, block_k, 4, 1)
    expected = expected_of(*tensors, is_causal, window, cu_seqlens)
    seen = seen_by(t_q, t_k, is_causal, window, cu_seqlens)
    num_tiles = visited_tiles(seen, block_q, block_k)
    with heuristics.override_tiles(**dict.fromkeys(("forward", "dq", "dkdv"), tiles)):
        got = run_kernels(*tensors, is_causal, window, cu_seqlens)
    # products per tile: scores and values in forward, three in dq, four in dkdv
    assert len(products) == 9 * heads * num_tiles
    for value, want in zip(got, expected, strict=True):
        assert relative(value, want, 1.0) < 5e-6


@needs_triton
@interpreted_only
def test_interp_operator_compiles_and_checks(interpreter):
    q, k, v, grad_o = made(2, 1, 24, 24)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu_seqlens = packed((8, 15))
    operator = torch.ops.stepgauge.flash_attention.default
    torch.library.opcheck(operator, (*leaves, True, 0.25, 8, cu_seqlens))
    lengths = torch.tensor([0, 8, 15])
    in_a_row = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    for function, given, grad in (
        (lambda *x: flash_attention(*x, is_causal=True, window=8), leaves, grad_o),
        (
            lambda *x: flash_attention_varlen(*x, lengths, window=8),
            in_a_row,
            grad_o[0].transpose(0, 1),
        ),
    ):
        eager = function(*given)
        expected = torch.autograd.grad(eager, given, grad)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
        assert torch.equal(compiled, eager)
        for a, b in zip(torch.autograd.grad(compiled, given, grad), expected, strict=True):
            assert torch.equal(a, b)
    with torch.autocast("cpu", dtype=torch.float16):
        assert flash_attention(q, k, v, window=8).dtype == torch.float16


# Registers with PyPI's Triton 3.6.0 (ptxas 12.8.93) before windows existed: bf16, causal, width
# 128, sm_90.
REGISTERS = {"forward": 141, "dq": 176, "dkdv": 255}


@needs_triton
@compiled_only
@pytest.mark.parametrize("name", list(REGISTERS))
def test_window_support_costs_no_registers_without_a_window(name):
    import triton

    tiles = heuristics.select_tiles(name, arch=90, itemsize=2, head_width=128, tma=True)
    plain = resources_of(build(name, 90, "bf16", 128, tiles))
    assert plain["stack"] == 0
    if triton.__version__.startswith("3.6."):
        assert plain["registers"] == REGISTERS[name]
    with_window = resources_of(build(name, 90, "bf16", 128, tiles, window=1024))
    assert with_window["stack"] <= (96 if name == "dkdv" else 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("window, ends", [(0, (700, 701, 1500)), (256, None), (100, (900,))])
def test_gpu_equals_float64(window, ends, dtype, limit, poisoned):
    tensors = made(4, 2, 1777, 1777, dtype, "cuda", 64)
    cu_seqlens = packed(ends, "cuda")
    for is_causal in (True, False):
        got = run_kernels(*tensors, is_causal, window, cu_seqlens)
        for value, want in zip(
            got, expected_of(*tensors, is_causal, window, cu_seqlens), strict=True
        ):
            assert relative(value, want, 1e-2) < limit
