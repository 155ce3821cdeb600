"""A softmax over rows in Triton, for `stepgauge bench op examples/softmax.py:softmax`; plain
PyTorch without a GPU.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS, WIDTH = 4096, 2048


def softmax_inputs(device):
    return (torch.randn(ROWS, WIDTH, device=device),)


def softmax_reference(x):
    return torch.softmax(x, dim=-1)


def softmax_flops(x):
    """A maximum, a difference, an exponential, a sum and a quotient for each element."""
    return 5 * x.numel()


def softmax(x):
    if triton is None or not x.is_cuda:
        shifted = (x - x.amax(-1, keepdim=True)).exp()
        return shifted / shifted.sum(-1, keepdim=True)
    y = torch.empty_like(x)
    rows, width = x.shape
    softmax_kernel[(rows,)](
        x, y, x.stride(0), width, BLOCK=triton.next_power_of_2(width), num_warps=8
    )
    return y


if triton is not None:

    @triton.jit
    def softmax_kernel(x_ptr, y_ptr, stride, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + column, mask=column < width, other=float("-inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + row * stride + column, e / tl.sum(e, axis=0), mask=column < width)
