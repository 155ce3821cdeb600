"""Small losses in torch's operators: which sizes use them, and their results."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.test_linear_cross_entropy import (  # noqa: E402
    TOLERANCES,
    assert_close,
    expected,
    gpu,
    inputs,
    results,
)

from stepgauge.kernels.linear_cross_entropy import (  # noqa: E402
    by_torch,
    chunked,
    linear_cross_entropy,
)
from stepgauge.spec import fused_loss  # noqa: E402

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "size, compiled, takes",
    [
        ((2048, 768, 10_000), False, True),
        ((2048, 2560, 10_000), False, False),
        ((100_000, 16, 8192), False, False),  # 3 GiB of logits in fp32
        ((2048, 2560, 10_000), True, True),
        ((512, 4096, 32_000), True, True),
        ((8192, 4096, 32_000), True, False),
    ],
)
def test_small_sizes_run_in_torch(size, compiled, takes):
    assert fused_loss.torch_computes(*size, compiled=compiled) is takes


def test_options_and_types_that_need_the_fused_loop(monkeypatch):
    monkeypatch.setattr(by_torch, "IS_ALLOWED", True)
    monkeypatch.setattr(chunked, "HAS_TRITON", True)

    def on(device):
        return SimpleNamespace(device=torch.device(device), numel=lambda: 64 * 32)

    weight = torch.empty(100, 32)
    assert by_torch.takes(on("cuda"), weight, BF16, z_loss=0.0, softcap=None)
    assert not by_torch.takes(on("cuda"), weight, BF16, z_loss=0.1, softcap=None)
    assert not by_torch.takes(on("cuda"), weight, BF16, z_loss=0.0, softcap=4.0)
    assert not by_torch.takes(on("cuda"), weight, torch.float16, z_loss=0.0)
    assert not by_torch.takes(on("cpu"), weight, BF16, z_loss=0.0)
    monkeypatch.setattr(by_torch, "IS_ALLOWED", False)
    assert not by_torch.takes(on("cuda"), weight, BF16, z_loss=0.0)


@pytest.fixture
def by_torch_here(monkeypatch):
    """Makes every loss run in torch's operators, also on a CPU, and returns the calls."""
    calls = []
    monkeypatch.setattr(by_torch, "takes", lambda *args, **options: calls.append(options) or True)
    return calls


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "ignore_index": 7}], ids=str)
def test_equals_the_oracle(by_torch_here, options):
    ignored = options.get("ignore_index", -100)
    hidden, weight, targets = inputs(60, 32, 100, BF16, ignored=ignored)
    wanted = expected(hidden, weight, targets, **options)
    actual = results(linear_cross_entropy, hidden, weight, targets, **options)
    assert_close(actual, wanted, TOLERANCES[BF16])
    shaped = hidden.view(2, 30, 32), weight, targets.int().view(2, 30)
    actual = results(linear_cross_entropy, *shaped, **options)
    assert_close([actual[0], actual[1].view(60, 32), actual[2]], wanted, TOLERANCES[BF16])
    assert len(by_torch_here) == 2


@pytest.mark.parametrize("ignored", [-100, 7])
@pytest.mark.parametrize("bad", [-1, 100])
def test_target_outside_the_vocabulary_gives_nan(by_torch_here, ignored, bad):
    hidden, weight, targets = inputs(60, 32, 100, BF16)
    targets[5] = bad
    assert linear_cross_entropy(hidden, weight, targets, ignore_index=ignored).isnan()
    targets[:] = ignored
    assert linear_cross_entropy(hidden, weight, targets, ignore_index=ignored).isnan()


def test_autocast_computes_in_its_type(by_torch_here):
    hidden, weight, targets = inputs(60, 32, 100)
    with torch.autocast("cpu", BF16):
        actual = results(linear_cross_entropy, hidden, weight, targets)
        assert linear_cross_entropy(hidden, weight, targets).dtype == torch.float32
    assert_close(actual, expected(hidden.to(BF16), weight.to(BF16), targets), TOLERANCES[BF16])


@gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_small_losses_equal_float64(compiled, monkeypatch):
    monkeypatch.setattr(by_torch, "IS_ALLOWED", True)
    hidden, weight, targets = inputs(256, 128, 1000, BF16, device="cuda")
    torch._dynamo.reset()
    function = linear_cross_entropy
    if compiled:
        function = torch.compile(function, fullgraph=True)
    actual = results(function, hidden, weight, targets)
    assert_close(actual, expected(hidden, weight, targets), TOLERANCES[BF16])
    targets[3] = 1000
    assert function(hidden, weight, targets).isnan()
