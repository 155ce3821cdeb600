"""The operations of training steps, each as a call with given sizes.

Operands rotate through more memory than a GPU's caches hold, as in a step. Operations have the names
that cost/ looks up: operation, operand layout, dtype.

Legend: M rows (tokens), N columns, K summed dimension, V vocabulary, H heads times batch, T sequence,
D head width, E experts.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.calibrate import passes
from stepgauge.calibrate.grids import Grid
from stepgauge.calibrate.timing import OtherWork, loop
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.operator_calls import call_of
from stepgauge.models.parts import ATTENTIONS, OPTIMIZERS
from stepgauge.runtime.recording import Call, on_capture_stream
from stepgauge.spec.calibration import ALONE, BATCHED, FULL_MASK, GROUPED

PRODUCTS, PASSES = "products", "passes"  # kinds of other work
EMBEDDING_ROWS = 1000
STRIDED_WIDTH = 2048
CACHE_BYTES = 128 * 2**20  # more than the L2 cache of any current GPU (H100: 50 MB)
MOST_COPIES = 24
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class TimedOperation(NamedTuple):
    """An operation with the sizes to time.

    make             make(*sizes, device) returns a call of it
    alternates_with  PRODUCTS or PASSES if it alternates with other work on a GPU; otherwise ""
    """

    axes: tuple[str, ...]
    grid: Iterable[tuple[int, ...]]
    make: Callable[..., Call]
    alternates_with: str = ""


def rotating(make: Callable[[], tuple[Any, ...]], call: Callable[..., object]) -> Call:
    """Returns a call that takes its operands in turn from more sets than a GPU's cache holds."""
    sets = [make()]
    on_gpu = [tensor for tensor in tensors_in(sets[0]) if tensor.is_cuda]
    if on_gpu:
        nbytes = sum(tensor.nbytes for tensor in on_gpu)
        enough = math.ceil(CACHE_BYTES / max(1, nbytes))
        sets += [make() for _ in range(min(MOST_COPIES, enough) - 1)]
    operands = itertools.cycle(sets)
    return lambda: call(*next(operands))


def _matmul(
    layout: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    batch: tuple[int, ...] = (),
) -> Call:
    """Layouts: nt is a linear layer's forward, nn its input gradient, tn its weight gradient."""
    new = functools.partial(torch.randn, *batch, device=device, dtype=dtype)
    if layout == "nt":
        return rotating(lambda: (new(m, k), new(n, k)), lambda x, w: x @ w.mT)
    if layout == "nn":
        return rotating(lambda: (new(m, k), new(k, n)), lambda x, w: x @ w)
    return rotating(lambda: (new(k, m), new(k, n)), lambda x, w: x.mT @ w)


def _batched_matmul(
    layout: str, dtype: torch.dtype, b: int, m: int, n: int, k: int, device: torch.device
) -> Call:
    return _matmul(layout, dtype, m, n, k, device, batch=(b,))


def _grouped_matmul(layout: str, e: int, m: int, n: int, k: int, device: torch.device) -> Call:
    """Products of e experts with equally many tokens each.

    Tokens are rows, except in the weight gradient (tn), which sums over them.
    """
    new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    tokens = k if layout == "tn" else m
    ends = torch.arange(1, e + 1, device=device, dtype=torch.int32) * (tokens // e)
    if layout == "nt":
        return rotating(
            lambda: (new(m, k), new(e, n, k)), lambda x, w: F.grouped_mm(x, w.mT, offs=ends)
        )
    if layout == "nn":
        return rotating(
            lambda: (new(m, k), new(e, k, n)), lambda x, w: F.grouped_mm(x, w, offs=ends)
        )
    return rotating(lambda: (new(k, m), new(k, n)), lambda x, w: F.grouped_mm(x.mT, w, offs=ends))


def _traffic(nbytes: int, device: torch.device) -> Call:
    """Reads half of the bytes and writes the other half, as elementwise operations do.

    On a CPU it writes to new memory, whose pages cost as much as the pass. On a GPU, new memory comes
    from the caching allocator.
    """
    new = functools.partial(torch.randn, max(1, nbytes // 8), device=device)
    if device.type == "cpu":
        return rotating(lambda: (new(),), lambda source: source * 2.0)
    return rotating(
        lambda: (new(), new()), lambda source, target: torch.mul(source, 2.0, out=target)
    )


def _cast(source: torch.dtype, target: torch.dtype, numel: int, device: torch.device) -> Call:
    return rotating(lambda: (torch.randn(numel, device=device).to(source),), lambda x: x.to(target))


def _strided(numel: int, device: torch.device) -> Call:
    """Copies a tensor with its two outer dimensions swapped; rows stay contiguous."""
    rows = max(2, numel // STRIDED_WIDTH) // 2
    new = functools.partial(torch.randn, 2, rows, min(numel, STRIDED_WIDTH), device=device)
    return rotating(lambda: (new(dtype=torch.bfloat16),), lambda x: x.transpose(0, 1).contiguous())


def _pass(
    name: str, is_backward: bool, dtype: torch.dtype, m: int, n: int, device: torch.device
) -> Call:
    make = functools.partial(passes.operands, name, dtype, m, n, device)
    return rotating(make, functools.partial(passes.run, name, is_backward))


def _compiled_pass(name: str, is_backward: bool, m: int, n: int, device: torch.device) -> Call:
    """Under autocast, with bf16 branches."""
    make = functools.partial(passes.operands, name, torch.bfloat16, m, n, device, compiled=True)
    return rotating(make, functools.partial(passes.run, name, is_backward, compiled=True))


def _residual(numel: int, device: torch.device) -> Call:
    new = functools.partial(torch.randn, numel, device=device)
    return rotating(lambda: (new(), new(dtype=torch.bfloat16)), passes.residual)


def _norm(
    name: str, is_backward: bool, dtype: torch.dtype, m: int, n: int, device: torch.device
) -> Call:
    normalise = F.rms_norm if name == "rmsnorm" else F.layer_norm

    def make() -> tuple[Tensor, ...]:
        x = torch.randn(m, n, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(n, device=device, dtype=dtype, requires_grad=True)
        y = normalise(x, (n,), weight, eps=1e-5)
        return x, weight, y, torch.randn_like(y)

    def backward(x: Tensor, weight: Tensor, y: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(y, (x, weight), grad, retain_graph=True)

    def forward(x: Tensor, weight: Tensor, y: Tensor, grad: Tensor) -> object:
        with torch.no_grad():
            return normalise(x, (n,), weight, eps=1e-5)

    return rotating(make, backward if is_backward else forward)


def _loss(is_backward: bool, m: int, v: int, device: torch.device) -> Call:
    """Cross-entropy of fp32 logits, as under autocast."""

    def make() -> tuple[Tensor, ...]:
        logits = torch.randn(m, v, device=device, requires_grad=True)
        targets = torch.randint(v, (m,), device=device)
        return logits, targets, F.cross_entropy(logits, targets)

    def backward(logits: Tensor, targets: Tensor, loss: Tensor) -> object:
        return torch.autograd.grad(loss, logits, retain_graph=True)

    def forward(logits: Tensor, targets: Tensor, loss: Tensor) -> object:
        return F.cross_entropy(logits.detach(), targets)

    return rotating(make, backward if is_backward else forward)


def _embedding_backward(m: int, n: int, device: torch.device) -> Call:
    """The gradient of an embedding with few rows, so that the sum over tokens dominates."""

    def make() -> tuple[Tensor, ...]:
        tokens = torch.randint(EMBEDDING_ROWS, (m,), device=device)
        return torch.randn(m, n, device=device), tokens

    def backward(grad: Tensor, tokens: Tensor) -> object:
        return torch.ops.aten.embedding_dense_backward(
            grad, tokens, EMBEDDING_ROWS, -1, scale_grad_by_freq=False
        )

    return rotating(make, backward)


def _attention(
    name: str, is_backward: bool, dtype: torch.dtype, h: int, t: int, d: int, device: torch.device
) -> Call:
    """Attention of h heads without grouped keys; causal unless the name ends in "-full".

    The heads of a position are contiguous, as the product before attention writes them.
    """
    # An explicit scale keeps small shapes on our kernels, as in compiled networks
    # (kernels/attention/by_torch.py).
    computed_by = name.removesuffix(FULL_MASK)
    scale = {"scale": d**-0.5} if computed_by == "triton" else {}
    is_causal = computed_by == name
    attend = functools.partial(ATTENTIONS[computed_by], is_causal=is_causal, **scale)

    def make() -> tuple[Tensor, ...]:
        new = functools.partial(torch.randn, 1, t, h, d, device=device, dtype=dtype)
        q, k, v = (new(requires_grad=True).transpose(1, 2) for _ in range(3))
        o = attend(q, k, v)
        return q, k, v, o, torch.randn_like(o)

    def backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)

    def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, grad: Tensor) -> object:
        with torch.no_grad():
            return attend(q, k, v)

    return rotating(make, backward if is_backward else forward)


def _optimizer(
    name: str, dtype: torch.dtype, numel: int, device: torch.device, **settings: bool
) -> Call:
    """One optimizer step over `numel` parameters in tensors of at most 2^24 elements."""
    sizes = [2**24] * (numel // 2**24) + [numel % 2**24]
    parameters = [
        torch.zeros(size, device=device, dtype=dtype).requires_grad_() for size in sizes if size
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    # torch refuses to capture a step without `capturable`. Its fused kernel is the same with it.
    if name == "adamw" and device.type == "cuda":
        settings["capturable"] = True
    return OPTIMIZERS[name](parameters, lr=1e-4, **settings).step


@functools.cache
def other_work(name: str, device: torch.device) -> OtherWork | None:
    """Returns the work that alternates with an operation: a bf16 product, or a pass over memory.

    None on a CPU, which holds its clock.
    """
    if device.type == "cpu":
        return None
    with on_capture_stream(device):
        is_product = name == PRODUCTS
        product = functools.partial(_matmul, "nt", torch.bfloat16, 4096, 4096, 4096)
        call = product(device) if is_product else _traffic(2**28, device)
        call()
        return OtherWork(call, loop(call, device, 10))


def _traced_call(text: str, device: torch.device) -> Call:
    operands, operator = call_of(text, device)
    return rotating(operands, lambda args, kwargs: operator(*args, **kwargs))


TRACED_CALLS = TimedOperation(("call",), (), _traced_call, PRODUCTS)
DIRECTIONS = ("forward", "backward")


def operations(grid: Grid) -> Mapping[str, TimedOperation]:
    """Returns the operations that are calibrated on a kind of device, by name."""
    return {
        **_products(grid), **_batched_products(grid), **_grouped_products(grid), **_passes(grid),
        **_elementwise(grid), **_norms(grid), **_attentions(grid), **_ends(grid),
    }  # fmt: skip


def _products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns matrix products. Those in bf16 alternate with passes; some shapes are also timed back to
    back.
    """
    found = {}
    for dtype, layout in itertools.product(grid.widths, ("nt", "nn", "tn")):
        # tokens are rows, except in the weight gradient (tn), which sums over them
        order = (1, 2, 0) if layout == "tn" else (0, 1, 2)
        shapes = [tuple(shape[i] for i in order) for shape in grid.products(dtype)]
        timed = TimedOperation(
            ("m", "n", "k"), shapes, functools.partial(_matmul, layout, DTYPES[dtype])
        )
        name = f"matmul {layout} {dtype}"
        found[name] = timed
        if dtype == "bf16" and grid.alternates:
            found[name] = timed._replace(alternates_with=PASSES)
            few = [s for s in shapes if set(s) <= {*grid.coarse_tokens, *grid.coarse_widths}]
            found[f"{name} {ALONE}"] = timed._replace(grid=few)
    return found


def _batched_products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the batched products of eager attention."""
    found = {}
    for dtype, layout in itertools.product(grid.widths, ("nt", "nn", "tn")):
        make = functools.partial(_batched_matmul, layout, DTYPES[dtype])
        found[f"matmul {BATCHED}{layout} {dtype}"] = TimedOperation(
            ("b", "m", "n", "k"),
            grid.batched_products(),
            make,
            PASSES if dtype == "bf16" and grid.alternates else "",
        )
    return found


def _grouped_products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the products of experts, on GPUs and in bf16 only."""
    found = {}
    for layout in ("nt", "nn", "tn"):
        shapes = [
            (e, n, k, m) if layout == "tn" else (e, m, n, k)
            for e, m, n, k in itertools.product(*grid.grouped)
        ]
        make = functools.partial(_grouped_matmul, layout)
        if shapes:
            found[f"matmul {GROUPED}{layout} bf16"] = TimedOperation(
                ("e", "m", "n", "k"), shapes, make, PASSES
            )
    return found


def _passes(grid: Grid) -> dict[str, TimedOperation]:
    sizes = [(size,) for size in grid.bytes]
    found = {"traffic": TimedOperation(("bytes",), sizes, _traffic, PRODUCTS)}
    for source, target in (("fp32", "bf16"), ("bf16", "fp32")):
        make = functools.partial(_cast, DTYPES[source], DTYPES[target])
        numbers = [(size // 8,) for size in grid.bytes]
        found[f"cast {source} {target}"] = TimedOperation(("numel",), numbers, make, PRODUCTS)
    return found


def _elementwise(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the elementwise work of calibrate/passes.py."""
    found = {}
    for name, direction, dtype in itertools.product(grid.passes, DIRECTIONS, ("bf16", "fp32")):
        if (name, direction) == ("split", "forward"):
            continue  # only views
        make = functools.partial(_pass, name, direction == "backward", DTYPES[dtype])
        shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
        other = PRODUCTS if dtype == "bf16" else ""  # in fp32, a GPU holds its clock
        found[f"{name} {direction} {dtype}"] = TimedOperation(("m", "n"), shapes, make, other)
    if grid.passes:
        numbers = [(size // 8,) for size in grid.bytes]
        found["residual mixed"] = TimedOperation(("numel",), numbers, _residual, PRODUCTS)
        found["strided copy bf16"] = TimedOperation(("numel",), numbers, _strided, PRODUCTS)
    for name, direction in itertools.product(grid.compiled_passes, DIRECTIONS):
        make = functools.partial(_compiled_pass, name, direction == "backward")
        found[f"compiled {name} {direction}"] = TimedOperation(
            ("m", "n"), grid.compiled_shapes, make, PRODUCTS
        )
    return found


def _norms(grid: Grid) -> dict[str, TimedOperation]:
    found = {}
    for name, direction, dtype in itertools.product(
        ("rmsnorm", "layernorm"), DIRECTIONS, ("bf16", "fp32")
    ):
        make = functools.partial(_norm, name, direction == "backward", DTYPES[dtype])
        shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
        found[f"{name} {direction} {dtype}"] = TimedOperation(("m", "n"), shapes, make, PRODUCTS)
    return found


def _attentions(grid: Grid) -> dict[str, TimedOperation]:
    found = {}
    for name, direction, dtype in itertools.product(grid.attentions, DIRECTIONS, ("bf16", "fp32")):
        make = functools.partial(_attention, name, direction == "backward", DTYPES[dtype])
        other = PASSES if dtype == "bf16" else ""
        if shapes := grid.attention_shapes(name, dtype):
            found[f"attention {name} {direction} {dtype}"] = TimedOperation(
                ("h", "t", "d"), shapes, make, other
            )
    return found


def _ends(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the embedding's gradient, the loss and the optimizers."""
    shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
    found = {
        "embedding backward": TimedOperation(("m", "n"), shapes, _embedding_backward, PRODUCTS)
    }
    for direction in DIRECTIONS:
        make = functools.partial(_loss, direction == "backward")
        found[f"cross-entropy {direction}"] = TimedOperation(
            ("m", "v"), grid.losses(), make, PRODUCTS
        )
    for name, dtype in itertools.product(grid.optimizers, ("fp32", "bf16")):
        make = functools.partial(_optimizer, name, DTYPES[dtype])
        counts = [(number,) for number in grid.parameters]
        found[f"optimizer {name} {dtype}"] = TimedOperation(("numel",), counts, make)
        if name == "fused":
            found["optimizer fused master"] = TimedOperation(
                ("numel",), counts, functools.partial(make, master_weights=True)
            )
    return found
