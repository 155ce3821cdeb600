"""Linear + cross-entropy against float64: the oracle, the plain path, and the kernels in the
interpreter, compiled ahead of time and on a GPU.
"""

import pytest
import torch
from tests.kernels.triton_here import compile_ahead, compiled_only, interpreted_only, needs_triton
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.kernels import linear_cross_entropy as package
from stepgauge.kernels.linear_cross_entropy import (
    FusedLinearCrossEntropy,
    chunked,
    linear_cross_entropy,
    reference,
)
from stepgauge.spec import fused_loss

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"z_loss": 0.05},
    {"softcap": 4.0},
    {"softcap": 4.0, "z_loss": 0.02, "reduction": "sum", "ignore_index": 7},
]


def gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")(test)
    )


@pytest.fixture
def poisoned():
    """Makes torch.empty return NaN, so that reading memory before it is written shows up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(N, D, V, dtype=torch.float32, *, spread=1.0, ignored=-100, device="cpu", seed=0):
    """Returns hidden states, weight and targets, of which some are `ignored`. The logits' standard
    deviation is about `spread`.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(N, D, generator=generator)
    weight_VD = torch.randn(V, D, generator=generator) * spread * D**-0.5
    targets_N = torch.randint(0, V, (N,), generator=generator)
    targets_N[1::9] = ignored
    return hidden_ND.to(device, dtype), weight_VD.to(device, dtype), targets_N.to(device)


def confident_inputs(N, D, V, dtype, top, *, device="cpu"):
    """Returns inputs for which the target's logit is about `top` and the others have a standard
    deviation of about 0.5, so that the loss is about V exp(-top).
    """
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(V, D, generator=generator) * D**-0.5
    targets_N = torch.randint(0, V, (N,), generator=generator)
    chosen_ND = weight_VD[targets_N]
    hidden_ND = (
        top * chosen_ND / chosen_ND.square().sum(1, keepdim=True)
        + torch.randn(N, D, generator=generator) / 2
    )
    return hidden_ND.to(device, dtype), weight_VD.to(device, dtype), targets_N.to(device)


def results(function, hidden, weight, targets, *, grad=1.0, **options):
    """Returns the loss and both gradients as float64, for an incoming gradient of `grad`."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss = function(hidden, weight, targets, **options)
    loss.backward(torch.full_like(loss, grad))
    assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
    return [x.detach().double() for x in (loss, hidden.grad, weight.grad)]


def expected(hidden, weight, targets, **options):
    return results(
        reference.linear_cross_entropy, hidden.double(), weight.double(), targets, **options
    )


def errors(actual, wanted):
    return [((a - w).norm() / w.norm()).item() for a, w in zip(actual, wanted, strict=True)]


def assert_close(actual, wanted, tolerance):
    relative = errors(actual, wanted)
    assert all(error < tolerance for error in relative), (
        f"errors of loss, hidden, weight: {relative}, tolerance {tolerance}"
    )


# Relative errors of loss and gradients if logits have a standard deviation of 1. In bf16, logits
# and their gradient are each rounded by 2^-9, and the result once more.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


# The oracle


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_oracle_equals_torch(reduction):
    hidden, weight, targets = inputs(11, 5, 13, torch.float64)

    def stock(hidden, weight, targets):
        return F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)

    assert_close(
        expected(hidden, weight, targets, reduction=reduction),
        results(stock, hidden, weight, targets),
        1e-14,
    )


def test_oracles_options_follow_the_equation():
    hidden, weight, targets = torch.tensor([[2.0]]), torch.tensor([[1.0], [3.0]]), torch.tensor([1])
    logits = torch.tensor([5 * torch.tanh(torch.tensor(0.4)), 5 * torch.tanh(torch.tensor(1.2))])
    lse = logits.exp().sum().log()
    wanted = lse - logits[1] + 0.1 * lse**2
    torch.testing.assert_close(
        reference.linear_cross_entropy(hidden, weight, targets, z_loss=0.1, softcap=5.0), wanted
    )


# The plain path, and behaviour that all paths share


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("chunk", [None, 8, 3, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_against_float64(dtype, options, chunk):
    hidden, weight, targets = inputs(23, 17, 101, dtype, ignored=options.get("ignore_index", -100))
    max_logits_bytes = chunk and chunk * 128 * dtype.itemsize
    actual = results(
        linear_cross_entropy,
        hidden,
        weight,
        targets,
        weight_grad_accumulation="fp32",
        max_logits_bytes=max_logits_bytes,
        **options,
    )
    assert_close(actual, expected(hidden, weight, targets, **options), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("N", "D", "V"), [(1, 1, 1), (1, 1, 2), (3, 64, 64), (130, 7, 65), (64, 33, 1)]
)
def test_odd_shapes(N, D, V):
    hidden, weight, targets = inputs(N, D, V)
    actual, wanted = (
        results(linear_cross_entropy, hidden, weight, targets),
        expected(hidden, weight, targets),
    )
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("top", "loss"), [(8, 0.1), (16, 1e-4), (22, 4e-7), (28, 2e-9)])
def test_confident_logits(dtype, top, loss):
    hidden, weight, targets = confident_inputs(32, 256, 512, dtype, top)
    wanted = expected(hidden, weight, targets)
    assert loss / 4 < wanted[0] < 4 * loss
    actual = results(linear_cross_entropy, hidden, weight, targets)
    # float64 itself leaves 1e-16 / loss of 1 - p.
    assert_close(actual, wanted, TOLERANCES[dtype] + 1e-16 / loss)


@pytest.mark.parametrize("top", [30.0, 300.0, 3e4])
def test_logits_beyond_the_range_of_exp(top):
    hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[top, 0.0], [0.0, 1.0], [-top, 1.0]])
    logits = torch.tensor([top, 0.0, -top], dtype=torch.float64)
    for target in range(3):
        # Computed by hand, because autograd's 1 - p has only two digits at exp(-30), even in
        # float64.
        others = torch.cat([logits[:target], logits[target + 1 :]]).logsumexp(0)
        loss = (others - logits[target]).clamp(min=0) + torch.log1p(
            torch.exp(-(others - logits[target]).abs())
        )
        slope = logits.softmax(0)
        slope[target] = -torch.sigmoid(others - logits[target])
        wanted = loss, slope[None] @ weight.double(), slope[:, None] @ hidden.double()
        actual = results(linear_cross_entropy, hidden, weight, torch.tensor([target]))
        for a, w in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, w, atol=1e-36, rtol=4e-6)


def test_saturated_softcap_keeps_its_gradient():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[60.0], [50.0]])
    for target in range(2):
        targets = torch.tensor([target])
        actual = results(linear_cross_entropy, hidden, weight, targets, softcap=5.0)
        # In float64, 1 - tanh(12)^2 has only four digits.
        assert_close(actual, expected(hidden, weight, targets, softcap=5.0), 1e-4)


def test_rounding_of_the_weights_gradient():
    """The documented bounds: eight chunks in bf16 have about twice the error of one rounding, an
    fp32 sum has the error of one.
    """
    hidden, weight, targets = inputs(1024, 64, 512, torch.bfloat16, spread=0.2)
    wanted = expected(hidden, weight, targets)
    one_rounding = errors([wanted[2].bfloat16().double()], wanted[2:])[0]

    def error(num_chunks, accumulation):
        chunk_bytes = 1024 // num_chunks * 512 * 2
        return errors(
            results(
                linear_cross_entropy,
                hidden,
                weight,
                targets,
                weight_grad_accumulation=accumulation,
                max_logits_bytes=chunk_bytes,
            ),
            wanted,
        )[2]

    # One chunk is like stock PyTorch: the logits' gradient is rounded, then the weight's.
    one_chunk = error(1, "weight")
    assert one_rounding < one_chunk < 1.6 * one_rounding
    assert error(8, "fp32") < 1.02 * one_chunk
    assert 1.5 * one_rounding < error(8, "weight") < 2.6 * one_rounding
    assert error(8, "auto") == error(8, "weight")
    assert error(16, "auto") == error(16, "fp32") < 1.02 * one_chunk


@pytest.mark.parametrize(
    ("num_tokens", "row_bytes", "limit", "wanted"),
    [
        (16384, 256512, 2**29, 2048),
        (2048, 20096, 2**29, 2048),
        (8192, 64000, 2**29, 8192),
        (16384, 100608, 2**29, 4096),
    ],
)
def test_chunk_tokens(num_tokens, row_bytes, limit, wanted):
    assert chunked.chunk_tokens(num_tokens, row_bytes, limit) == wanted


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 127, 129, 1000, 4097])
@pytest.mark.parametrize("limit_tokens", [0.5, 1, 100, 128, 200, 5000])
def test_chunk_stays_within_its_limit(num_tokens, limit_tokens):
    tokens = chunked.chunk_tokens(num_tokens, 100, int(100 * limit_tokens))
    assert 1 <= tokens <= max(1, limit_tokens)
    num_chunks = -(-num_tokens // tokens)
    assert num_chunks <= -(-num_tokens // max(1, int(limit_tokens))) or num_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "limit"), [(512, 2**29), (16_384, 16_384 * 256_512), (16_385, 2**29)]
)
def test_logits_of_few_tokens_are_one_chunk(tokens, limit):
    """Up to 4 D tokens, here with D 4096 and 128,256 words in 16 bits."""
    assert fused_loss.logits_bytes(tokens, 4096, 256_512) == limit


@pytest.mark.parametrize(("words", "rows"), [(10_000, 10_000), (50_257, 50_304), (50_304, 50_304)])
def test_only_an_unaligned_vocabulary_is_padded(words, rows):
    """cuBLAS's fast kernels need 16-byte alignment, but padding costs a copy of the weight."""
    assert fused_loss.operand_rows(words, 2) == rows
    assert fused_loss.operand_rows(words, 4) == words


def test_strides_and_leading_dimensions():
    hidden, weight, targets = inputs(24, 10, 30)
    wanted = results(linear_cross_entropy, hidden, weight, targets)
    strided = [
        hidden.repeat_interleave(2, 0)[::2],
        weight.mT.contiguous().mT,
        targets.repeat_interleave(3)[::3],
    ]
    assert not any(x.is_contiguous() for x in strided)
    assert_close(results(linear_cross_entropy, *strided), wanted, 1e-6)
    columns = hidden.repeat_interleave(2, 1)[:, ::2]
    assert_close(results(linear_cross_entropy, columns, weight, targets.int()), wanted, 1e-6)
    loss, grad_hidden, grad_weight = results(
        linear_cross_entropy, hidden.view(2, 3, 4, 10), weight, targets.view(2, 3, 4)
    )
    assert grad_hidden.shape == (2, 3, 4, 10)
    assert_close((loss, grad_hidden.view(24, 10), grad_weight), wanted, 1e-6)
    assert linear_cross_entropy(hidden[0], weight, targets[0]).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_token_counts(dtype):
    hidden, weight, _ = inputs(6, 4, 9, dtype)
    loss, grad_hidden, grad_weight = results(
        linear_cross_entropy, hidden, weight, torch.full((6,), -100)
    )
    assert loss.isnan() and not grad_hidden.any() and not grad_weight.any()
    empty = torch.empty(0, dtype=torch.long)
    loss, grad_hidden, grad_weight = results(linear_cross_entropy, hidden[:0], weight, empty)
    assert loss.isnan() and grad_hidden.shape == (0, 4) and not grad_weight.any()
    assert results(linear_cross_entropy, hidden[:0], weight, empty, reduction="sum")[0] == 0


def test_incoming_gradient_scales_the_gradients():
    for dtype in (torch.float32, torch.float16):
        hidden, weight, targets = inputs(12, 8, 20, dtype)
        actual = results(linear_cross_entropy, hidden, weight, targets, grad=-512.0)
        loss, *gradients = expected(hidden, weight, targets)
        assert_close(
            actual, [loss, *(-512 * gradient for gradient in gradients)], TOLERANCES[dtype]
        )


def test_fp16_gradients_survive_until_the_loss_scale():
    """p/N is far below fp16's smallest number; multiplied by the loss scale it is not."""
    hidden, weight, targets = inputs(4096, 8, 100, torch.float16)
    _, *actual = results(linear_cross_entropy, hidden, weight, targets, grad=2.0**16)
    _, *wanted = expected(hidden, weight, targets)
    assert_close(actual, [2.0**16 * gradient for gradient in wanted], 1e-3)


def test_backward_returns_its_buffers_and_runs_once():
    hidden, weight, targets = inputs(6, 4, 9)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    held = [gradient.data_ptr() for gradient in loss.grad_fn.saved_tensors[:2]]
    loss.backward(retain_graph=True)
    assert len(held) == 2 and 0 not in held
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    hidden.grad = weight.grad = None
    loss = linear_cross_entropy(hidden, weight, targets)
    held = [gradient.data_ptr() for gradient in loss.grad_fn.saved_tensors[:2]]
    loss.backward()
    assert held == [hidden.grad.data_ptr(), weight.grad.data_ptr()]


@pytest.mark.parametrize(
    ("trains_hidden", "trains_weight"), [(True, False), (False, True), (False, False)]
)
def test_only_needed_gradients_are_computed(trains_hidden, trains_weight):
    hidden, weight, targets = inputs(6, 4, 9)
    _, *wanted = expected(hidden, weight, targets)
    hidden.requires_grad_(trains_hidden), weight.requires_grad_(trains_weight)
    with FlopCounterMode(display=False) as flops:
        loss = linear_cross_entropy(hidden, weight, targets)
        if trains_hidden or trains_weight:
            loss.backward()
    assert flops.get_total_flops() == 2 * 6 * 4 * 9 * (1 + trains_hidden + trains_weight)
    for x, gradient, trains in zip(
        (hidden, weight), wanted, (trains_hidden, trains_weight), strict=True
    ):
        assert (x.grad is not None) == trains
        if trains:
            assert_close([x.grad.double()], [gradient], 2e-6)


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, targets = inputs(6, 4, 9)
    weight.requires_grad_()
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        loss = linear_cross_entropy(hidden, weight, targets)
    assert flops.get_total_flops() == 2 * 6 * 4 * 9 and not loss.requires_grad
    torch.testing.assert_close(loss.double(), expected(hidden, weight, targets)[0])


def test_training_equals_stock_pytorch():
    """With SGD, whose step depends on the gradient's scale, and two micro-batches per step."""

    def train(compute_loss):
        torch.manual_seed(0)
        body, head = nn.Linear(8, 12), nn.Linear(12, 40, bias=False)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.5)
        losses = []
        for step in range(6):
            for micro in range(2):
                hidden, _, targets = inputs(16, 8, 40, seed=2 * step + micro)
                loss = compute_loss(body(hidden).tanh(), head.weight, targets) / 2
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), head.weight.detach(), body.weight.detach()

    stock = train(
        lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight), targets)
    )
    for ours, theirs in zip(train(linear_cross_entropy), stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_autocast_multiplies_in_its_type_as_linear_does():
    hidden, weight, targets = inputs(32, 16, 50)
    bf16 = [x.bfloat16() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(linear_cross_entropy, hidden, weight, targets)
    wanted = expected(*bf16, targets)
    assert_close(actual, wanted, TOLERANCES[torch.bfloat16])
    # The logits were rounded to bf16, so the loss differs from that of fp32 logits.
    assert errors(results(linear_cross_entropy, hidden, weight, targets), wanted)[1] > 1e-3
    # The weight's gradient was summed and returned in fp32, so it has more digits than bf16.
    assert (actual[2] != actual[2].bfloat16()).any()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = results(linear_cross_entropy, bf16[0], weight, targets)
    assert_close(mixed, wanted, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(autocast):
    hidden, weight, targets = inputs(10, 6, 21)

    def loss(hidden, weight, targets):
        return 3 * linear_cross_entropy(2 * hidden, weight, targets, z_loss=0.1)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = results(loss, hidden, weight, targets)
        torch._dynamo.reset()
        compiled = results(
            torch.compile(loss, fullgraph=True, backend="aot_eager"), hidden, weight, targets
        )
    assert_close(compiled, eager, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(dtype):
    hidden, weight, targets = inputs(5, 4, 9, dtype)
    arguments = (targets, dtype, True, -100, 0.1, None, "auto", 0, True, True)
    operator = torch.ops.stepgauge.linear_cross_entropy.default
    # Backward scales the operator's outputs in place, which in fp16 breaks the last check, because
    # it keeps them.
    checks = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    checks = checks[:3] if dtype == torch.float16 else checks
    torch.library.opcheck(
        operator, (hidden.requires_grad_(), weight.requires_grad_(), *arguments), test_utils=checks
    )


def test_autograd_function():
    hidden, weight, targets = inputs(5, 4, 9)
    options = (torch.float32, True, -100, 0.0, None, "auto", 0, True, True)

    def apply(hidden, weight, targets):
        return package.LinearCrossEntropyFunction.apply(hidden, weight, targets, *options)[0]

    assert_close(results(apply, hidden, weight, targets), expected(hidden, weight, targets), 2e-6)


def test_with_and_without_the_operator_results_are_equal(monkeypatch):
    hidden, weight, targets = inputs(10, 6, 21)
    direct = results(linear_cross_entropy, hidden, weight, targets, grad=3.0)
    calls = []
    monkeypatch.setattr(package, "is_plain_eager", lambda *tensors: calls.append(len(tensors)))
    by_operator = results(linear_cross_entropy, hidden, weight, targets, grad=3.0)
    assert calls and all(torch.equal(a, b) for a, b in zip(by_operator, direct, strict=True))


def test_module_replaces_the_output_layer():
    linear = nn.Linear(6, 21, bias=False)
    hidden, _, targets = inputs(10, 6, 21)
    module = FusedLinearCrossEntropy(6, 21, z_loss=0.1)
    module.load_state_dict(linear.state_dict())
    torch.testing.assert_close(module(hidden), linear(hidden))
    wanted = linear_cross_entropy(hidden, linear.weight, targets, z_loss=0.1)
    torch.testing.assert_close(module(hidden, targets), wanted)
    shared = FusedLinearCrossEntropy.of(linear)
    assert shared.weight is linear.weight
    with pytest.raises(ValueError, match="bias"):
        FusedLinearCrossEntropy.of(nn.Linear(6, 21))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"\(3, 5\) and \(9, 4\)"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"targets of shape \(3,\) .*\(4,\)"),
        ({"targets": torch.zeros(3)}, "float32"),
        ({"targets": torch.tensor([0, 9, 1])}, "target 9 .* vocabulary of 9"),
        ({"targets": torch.tensor([0, -1, 1])}, "target -1 "),
        ({"hidden": torch.zeros(3, 4).bfloat16()}, "bfloat16 and weight is torch.float32"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.int32)}, "int32"),
        ({"reduction": "none"}, "'none'"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"weight_grad_accumulation": "bf16"}, "'bf16'"),
        ({"max_logits_bytes": 0}, "max_logits_bytes is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_mistake(change, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "targets": torch.zeros(3, dtype=torch.long),
    }
    arguments |= change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            *[arguments.pop(name) for name in ("hidden", "weight", "targets")], **arguments
        )


# The Triton kernels in the interpreter, and compiled without a GPU


STREAM = {
    "BLOCK_V": 64,
    "VEC": 4,
    "STAGES": 1,
    "REVERSE": True,
    "KEEP": "evict_last",
    "num_warps": 4,
}
HOLD = {"BLOCK_V": 256, "num_warps": 4}


@pytest.fixture
def on_kernels(monkeypatch, interpreter, poisoned):
    from stepgauge.kernels.linear_cross_entropy import triton as kernels

    monkeypatch.setattr(chunked, "kernels_for", lambda device, dtype: kernels)
    return kernels


@needs_triton
@interpreted_only
@pytest.mark.parametrize("launch", [STREAM, HOLD], ids=["streamed", "held"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_interp_kernels_equal_float64(dtype, launch, on_kernels, monkeypatch):
    chosen = {"BLOCK_D": 16, **launch}
    monkeypatch.setattr(on_kernels, "row_launch", lambda *_, **__: chosen)
    first = 0 if (launch is STREAM) == (dtype == torch.float32) else 1
    for options in OPTIONS[first::2]:
        ignored = options.get("ignore_index", -100)
        hidden, weight, targets = inputs(12, 17, 150, dtype, ignored=ignored)
        weight = weight.mT.contiguous().mT
        memory = {"max_logits_bytes": 5 * 192 * dtype.itemsize}
        given = linear_cross_entropy, hidden, weight, targets
        actual = results(*given, grad=2.0, **memory, **options)
        loss, *gradients = expected(hidden, weight, targets, **options)
        assert_close(actual, [loss, *(2 * gradient for gradient in gradients)], TOLERANCES[dtype])


@needs_triton
@interpreted_only
def test_interp_confident_rows_and_a_target_outside(on_kernels):
    hidden, weight, targets = confident_inputs(8, 64, 100, torch.float32, 24)
    actual = results(linear_cross_entropy, hidden, weight, targets)
    assert_close(actual, expected(hidden, weight, targets), 1e-5)
    hidden, weight, targets = inputs(4, 3, 5)
    targets[2] = 5
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@needs_triton
@interpreted_only
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("bad", [None, -1, 7])
def test_interp_known_targets_equal_plain(ignored, bad, interpreter):
    from stepgauge.kernels.linear_cross_entropy import plain
    from stepgauge.kernels.linear_cross_entropy import triton as kernels

    targets = torch.tensor([0, 6, ignored, 5], dtype=torch.int32)
    if bad is not None:
        targets[1] = bad
    known, poison = kernels.known_targets(targets, 7, ignore_index=ignored)
    wanted, wanted_poison = plain.known_targets(targets, 7, ignore_index=ignored)
    assert torch.equal(known, wanted) and known.dtype == torch.int64
    assert poison.isnan() == wanted_poison.isnan() == (bad is not None)
    assert bad is not None or poison == wanted_poison == 0.0


@needs_triton
@compiled_only
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_rows_build_for_every_architecture(architecture):
    for dtype in ("bf16", "fp16", "fp32"):
        for row_length in (128256, 10048):
            build_rows(architecture, dtype, row_length=row_length)


@needs_triton
@compiled_only
def test_other_kernels_build():
    from stepgauge.kernels.linear_cross_entropy import triton as kernels

    build_rows(90, "bf16", row_length=10048, HAS_SOFTCAP=True)
    build_rows(90, "bf16", row_length=128256, HAS_SOFTCAP=True)
    build_rows(90, "bf16", row_length=4096, WRITE_GRADIENT=False)
    how = {"aligned": (), "options": {"num_warps": 8}}
    count = {"targets_ptr": "*i64", "scale_ptr": "*fp32", "N": "i32"}
    constants = {"ignore_index": -100, "BLOCK_N": 4096}
    assert compile_ahead(kernels.loss_scale_kernel, 90, count, constants, **how).asm["cubin"]
    known = {
        "targets_ptr": "*i64",
        "known_ptr": "*i64",
        "poison_ptr": "*fp32",
        "N": "i32",
        "V": "i32",
    }
    assert compile_ahead(kernels.known_targets_kernel, 90, known, constants, **how).asm["cubin"]
    multiply = {
        "x_ptr": "*bf16",
        "y_ptr": "*fp32",
        "factor_ptr": "*fp32",
        "num_x": "i32",
        "num_y": "i64",
    }
    assert compile_ahead(kernels.multiply_kernel, 90, multiply, {"BLOCK": 4096}, **how).asm["cubin"]


def build_rows(architecture, dtype, *, row_length, **flags):
    from stepgauge.kernels.linear_cross_entropy import triton as kernels

    pointers = dict.fromkeys(("logits_ptr", "hidden_ptr", "weight_ptr"), f"*{dtype}")
    pointers |= {"targets_ptr": "*i64", "scale_ptr": "*fp32", "losses_ptr": "*fp32"}
    sizes = dict.fromkeys(("V", "P_units", "D", "hidden_units", "weight_units"), "i32")
    constants = {"HAS_SOFTCAP": False, "WRITE_GRADIENT": True, "SCALE_GRADIENT": True, **flags}
    constants |= {
        "stride_hidden_d": 1,
        "stride_weight_d": 1,
        "ROW_UNIT": kernels.ROW_UNIT,
        "STRIDE_UNIT": 8,
    }
    constants |= {"ignore_index": -100, "BLOCK_D": kernels.BLOCK_D}
    itemsize = 4 if dtype == "fp32" else 2
    launch = kernels.row_launch(row_length, itemsize, write_gradient=constants["WRITE_GRADIENT"])
    if flags.get("HAS_SOFTCAP") and "maxnreg" in launch:
        launch["maxnreg"] = 128
    options = {name: launch.pop(name) for name in ("num_warps", "maxnreg") if name in launch}
    signature = pointers | sizes | {"z_loss": "fp32", "softcap": "fp32"}
    is_held = "VEC" not in launch
    function = kernels.held_gradient_kernel if is_held else kernels.streamed_gradient_kernel
    kernel = compile_ahead(
        function, architecture, signature, constants | launch,
        aligned=("logits_ptr", "hidden_ptr", "weight_ptr"), options=options,
    )  # fmt: skip
    # Rows are read and written 16 bytes a thread, which a mask or a stride that Triton cannot
    # divide by 8 would undo.
    assert "L2::cache_hint.v4.b32" in kernel.asm["ptx"]
    assert ("st.global.v4.b32" in kernel.asm["ptx"]) == constants["WRITE_GRADIENT"]


# On a GPU


@gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("N", "D", "V", "chunk"), [(77, 129, 1001, None), (300, 256, 50257, 64), (513, 320, 4096, 100)]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gpu_against_float64(dtype, options, N, D, V, chunk):
    hidden, weight, targets = inputs(
        N, D, V, dtype, ignored=options.get("ignore_index", -100), device="cuda"
    )
    max_logits_bytes = chunk and chunk * -(-V // 64) * 64 * dtype.itemsize
    wanted = expected(hidden, weight, targets, **options)
    for accumulation, factor in (("fp32", 1), ("weight", 2)):
        actual = results(
            linear_cross_entropy,
            hidden,
            weight,
            targets,
            weight_grad_accumulation=accumulation,
            max_logits_bytes=max_logits_bytes,
            **options,
        )
        assert_close(actual, wanted, factor * TOLERANCES[dtype])


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("top", [8, 16, 22, 28])
def test_gpu_confident_logits(dtype, top):
    hidden, weight, targets = confident_inputs(128, 512, 5000, dtype, top, device="cuda")
    wanted = expected(hidden, weight, targets)
    actual = results(linear_cross_entropy, hidden, weight, targets)
    assert_close(actual[:1], wanted[:1], 1e-5 if dtype == torch.float32 else 2e-3)
    # fp16's smallest number is 6e-8: past that a probability is lost, and with it part of the
    # gradients.
    if dtype != torch.float16 or top == 8:
        assert_close(
            actual, wanted, {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        )


@gpu
def test_gpu_strides_and_leading_dimensions():
    hidden, weight, targets = inputs(240, 96, 1000, torch.bfloat16, device="cuda")
    wanted = expected(hidden, weight, targets)
    strided = [
        hidden.repeat_interleave(2, 0)[::2],
        weight.mT.contiguous().mT,
        targets.repeat_interleave(3)[::3],
    ]
    assert_close(results(linear_cross_entropy, *strided), wanted, TOLERANCES[torch.bfloat16])
    columns = hidden.repeat_interleave(2, 1)[:, ::2]
    assert_close(
        results(linear_cross_entropy, columns, weight, targets.int()),
        wanted,
        TOLERANCES[torch.bfloat16],
    )
    actual = results(linear_cross_entropy, hidden.view(2, 120, 96), weight, targets.view(2, 120))
    assert_close(
        [actual[0], actual[1].view(240, 96), actual[2]], wanted, TOLERANCES[torch.bfloat16]
    )


@gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_autocast(dtype, compiled):
    hidden, weight, targets = inputs(256, 128, 1000, device="cuda")
    torch._dynamo.reset()
    function = (
        torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    )
    with torch.autocast("cuda", dtype):
        loss, *gradients = results(function, hidden, weight, targets, grad=64.0)
    wanted = expected(hidden.to(dtype), weight.to(dtype), targets)
    actual = [loss, *(gradient / 64 for gradient in gradients)]
    assert_close(actual, wanted, TOLERANCES[dtype])


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpu_nothing_to_predict_and_a_bad_target(dtype):
    hidden, weight, targets = inputs(64, 32, 100, dtype, device="cuda")
    loss, *gradients = results(linear_cross_entropy, hidden, weight, torch.full_like(targets, -100))
    assert loss.isnan() and not any(gradient.any() for gradient in gradients)
    targets[3] = 100
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@gpu
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gpu_no_host_synchronisation(factor):
    hidden, weight, targets = inputs(300, 64, 1000, torch.bfloat16, device="cuda")
    hidden.requires_grad_(), weight.requires_grad_()
    grad = torch.full((), factor, device="cuda")
    linear_cross_entropy(hidden, weight, targets, max_logits_bytes=2**17).backward(
        grad
    )  # loads modules, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, targets, max_logits_bytes=2**17).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_gpu_extra_memory_is_one_chunk():
    hidden, weight, targets = inputs(8192, 512, 32000, torch.bfloat16, device="cuda")
    hidden.requires_grad_(), weight.requires_grad_()
    limit = 2**26
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(
            hidden, weight, targets, max_logits_bytes=limit, weight_grad_accumulation="weight"
        ).backward()
    results_bytes = sum(x.numel() * x.element_size() for x in (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before - results_bytes < limit + 2**21


@gpu
def test_gpu_more_than_2_31_logits_in_a_chunk():
    hidden, weight, targets = inputs(17000, 64, 128256, torch.bfloat16, device="cuda")
    assert 17000 * 128256 > 2**31
    one_chunk = results(linear_cross_entropy, hidden, weight, targets, max_logits_bytes=2**33)
    chunks = results(linear_cross_entropy, hidden, weight, targets, weight_grad_accumulation="fp32")
    assert_close(one_chunk, chunks, 3e-3)
    # The last rows lie past the 2^31st element.
    assert_close([one_chunk[1][-100:]], [chunks[1][-100:]], 3e-3)


@gpu
def test_gpu_more_than_2_31_weights():
    hidden, weight, targets = inputs(256, 8, 70000, torch.bfloat16, device="cuda")
    wide = torch.zeros(70000, 31000, dtype=torch.bfloat16, device="cuda")
    assert wide.numel() > 2**31
    wide[:, -8:] = weight
    hidden = F.pad(hidden, (31000 - 8, 0))
    targets[-50:] = torch.arange(69950, 70000, device="cuda")
    hidden.requires_grad_(), wide.requires_grad_()
    loss = linear_cross_entropy(hidden, wide, targets)
    (2 * loss).backward()
    wanted = expected(hidden.detach()[:, -8:], weight, targets)
    actual = [
        loss.detach().double(),
        hidden.grad[:, -8:].double() / 2,
        wide.grad[:, -8:].double() / 2,
    ]
    assert_close(actual, wanted, TOLERANCES[torch.bfloat16])
