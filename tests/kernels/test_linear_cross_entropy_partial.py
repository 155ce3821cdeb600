"""Linear + cross-entropy over parts of the vocabulary combines to the loss over all of it."""

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
)
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from stepgauge.kernels.linear_cross_entropy import chunked  # noqa: E402
from stepgauge.kernels.linear_cross_entropy.partial import (  # noqa: E402
    partial_backward,
    partial_forward,
)

TOKENS, WIDTH, VOCABULARY = 150, 24, 301
FIRST = 170  # words in the first of two parts


def made(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    factors = torch.rand(TOKENS, generator=generator)
    factors[3] = 0.0
    return [hidden.to(device, dtype), weight.to(device, dtype), targets.to(device),
            factors.to(device, torch.float64 if dtype == torch.float64 else torch.float32)]  # fmt: skip


def by_parts(hidden, weight, targets, factors):
    """Returns lse, the targets' logits, and the gradients of hidden and weight, from two parts."""
    parts = []
    for part, first in ((weight[:FIRST], 0), (weight[FIRST:], FIRST)):
        rows = targets - first
        rows = rows.where((rows >= 0) & (rows < len(part)), -1)
        parts.append((part, rows, *partial_forward(hidden, part, rows)))
    lse = torch.logaddexp(parts[0][2], parts[1][2])
    grads = [
        partial_backward(hidden, part, rows, lse, target, factors)
        for part, rows, _, target in parts
    ]
    target = parts[0][3] + parts[1][3]
    return lse, target, grads[0][0] + grads[1][0], torch.cat([grad[1] for grad in grads])


def expected_of(hidden, weight, targets, factors):
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = F.linear(hidden, weight)
    lse, target = logits.logsumexp(1), logits.gather(1, targets[:, None])[:, 0]
    grads = torch.autograd.grad(((lse - target) * factors).sum(), (hidden, weight))
    return lse.detach(), target.detach(), *grads


def largest_error(dtype, device="cpu"):
    tensors = made(dtype, device)
    pairs = zip(by_parts(*tensors), expected_of(*tensors), strict=True)
    return max(((value - want).norm() / want.norm()).item() for value, want in pairs)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_two_parts_combine_to_the_whole_and_hold_one_chunk(dtype, limit, monkeypatch):
    monkeypatch.setattr(chunked, "MAX_LOGITS_BYTES_PLAIN", 40 * 192 * dtype.itemsize)
    with Largest() as largest:
        error = largest_error(dtype)
    assert error < limit
    assert largest.elements == TOKENS * VOCABULARY  # the oracle holds all logits
    tensors = made(dtype)
    with Largest() as largest:
        by_parts(*tensors)
    assert largest.elements <= 40 * 192 < TOKENS * FIRST


def test_different_types_raise():
    hidden, weight, targets, _ = made(torch.float32)
    with pytest.raises(ValueError, match="expected one type"):
        partial_forward(hidden, weight.double(), targets)


@needs_triton
@interpreted_only
def test_interp_rows_equal_plain(interpreter, monkeypatch):
    from stepgauge.kernels.linear_cross_entropy import partial, partial_triton

    monkeypatch.setattr(partial, "_kernels_for", lambda hidden: partial_triton)
    monkeypatch.setattr(partial_triton, "BLOCK", 64)
    monkeypatch.setattr("tests.kernels.test_linear_cross_entropy_partial.TOKENS", 12)
    assert largest_error(torch.float32) < 1e-6


@needs_triton
@compiled_only
@pytest.mark.parametrize("name", ["lse_kernel", "gradient_kernel"])
def test_builds_ahead_of_time(name):
    from stepgauge.kernels.linear_cross_entropy import partial_triton

    kernel = getattr(partial_triton, name)
    types = {"logits": "*bf16", "rows": "*i64", "V": "i32", "P": "i32"}
    signature = {x: types.get(x, "*fp32") for x in kernel.arg_names if x != "BLOCK"}
    compiled = compile_ahead(
        kernel, 90, signature, {"BLOCK": partial_triton.BLOCK},
        aligned=[x for x in signature if x != "V"], options={"num_warps": partial_triton.NUM_WARPS},
    )  # fmt: skip
    assert resources_of(compiled)["stack"] == 0
    assert "ld.global.v4" in compiled.asm["ptx"]  # 16-byte loads


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_gpu_parts_combine_to_the_whole(dtype, limit):
    assert largest_error(dtype, "cuda") < limit
