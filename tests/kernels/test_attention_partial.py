"""Partial results over some of the keys combine to attention over all of them."""

import pytest
import torch

from stepgauge.kernels.attention import attention
from stepgauge.kernels.attention.partial import partial_backward, partial_forward

DEVICES = [
    pytest.param("cpu", torch.float64, 1e-12),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device, dtype, tolerance", DEVICES)
def test_two_parts_combine_to_the_whole(device, dtype, tolerance):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, 256, 64, dtype=dtype, device=device)
    k, v = torch.randn(2, 2, 2, 384, 64, dtype=dtype, device=device)
    parts = [slice(0, 256), slice(256, 384)]
    forwards = [partial_forward(q, k[:, :, part], v[:, :, part], False, 0.125) for part in parts]
    lse = torch.logaddexp(forwards[0][1], forwards[1][1])
    o = sum(o_part * (lse_part - lse).exp()[..., None] for o_part, lse_part in forwards).to(dtype)
    grads = [
        partial_backward(grad, q, k[:, :, part], v[:, :, part], o, lse, False, 0.125)
        for part in parts
    ]
    got = [
        o,
        lse,
        grads[0][0] + grads[1][0],
        *(torch.cat(x, 2) for x in list(zip(*grads, strict=True))[1:]),
    ]

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = attention(
        wide[0], *(x.repeat_interleave(2, 1) for x in wide[1:]), scale=0.125
    )
    expected.backward(grad.double())
    wanted = [expected, expected_lse, *(x.grad for x in wide)]
    for value, want in zip(got, wanted, strict=True):
        error = (value.double() - want).norm() / want.norm()
        assert error < tolerance
