"""The operations that are calibrated, each with its call (calls.py) and the sizes to time.

They have the names that cost/ looks up: operation, operand layout, dtype.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from stepgauge.calibrate import calls
from stepgauge.calibrate.grids import Grid
from stepgauge.calibrate.timing import OtherWork, loop
from stepgauge.runtime.recording import Call, on_capture_stream
from stepgauge.spec.calibration import ALIGNMENTS, ALONE, BATCHED, GROUPED

PRODUCTS, PASSES = "products", "passes"  # kinds of other work
DIRECTIONS = ("forward", "backward")
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


@functools.cache
def other_work(name: str, device: torch.device) -> OtherWork | None:
    """Returns the work that alternates with an operation: a bf16 product, or a pass over memory.

    None on a CPU, which holds its clock.
    """
    if device.type == "cpu":
        return None
    with on_capture_stream(device):
        is_product = name == PRODUCTS
        product = functools.partial(calls.matmul, "nt", torch.bfloat16, 4096, 4096, 4096)
        call = product(device) if is_product else calls.traffic(2**28, device)
        call()
        return OtherWork(call, loop(call, device, 10))


TRACED_CALLS = TimedOperation(("call",), (), calls.traced_call, PRODUCTS)


def operations(grid: Grid) -> Mapping[str, TimedOperation]:
    """Returns the operations that are calibrated on a kind of device, by name."""
    return {
        **_products(grid), **_unaligned_products(grid), **_batched_products(grid),
        **_grouped_products(grid), **_passes(grid),
        **_elementwise(grid), **_norms(grid), **_attentions(grid), **_ends(grid),
    }  # fmt: skip


def _products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns matrix products. Those in bf16 alternate with passes; some shapes are also timed back to
    back.
    """
    timed = {}
    for dtype, layout in itertools.product(grid.widths, ("nt", "nn", "tn")):
        # tokens are rows, except in the weight gradient (tn), which sums over them
        order = (1, 2, 0) if layout == "tn" else (0, 1, 2)
        shapes = [tuple(shape[i] for i in order) for shape in grid.products(dtype)]
        operation = TimedOperation(
            ("m", "n", "k"), shapes, functools.partial(calls.matmul, layout, DTYPES[dtype])
        )
        name = f"matmul {layout} {dtype}"
        timed[name] = operation
        if dtype == "bf16" and grid.alternates:
            timed[name] = operation._replace(alternates_with=PASSES)
            few = [s for s in shapes if set(s) <= {*grid.coarse_tokens, *grid.coarse_widths}]
            timed[f"{name} {ALONE}"] = operation._replace(grid=few)
    return timed


def _unaligned_products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the head's products with vocabularies that are no multiple of ALIGNED, on GPUs."""
    timed = {}
    orders = {"nt": (0, 1, 2), "nn": (0, 2, 1), "tn": (1, 2, 0)}  # of tokens, vocabulary and width
    for alignment, layout in itertools.product((1, 2), orders):
        heads = [(m, v + alignment, d) for m, v, d in itertools.product(*grid.unaligned)]
        shapes = [tuple(head[i] for i in orders[layout]) for head in heads]
        make = functools.partial(calls.matmul, layout, torch.bfloat16)
        if shapes:
            name = f"matmul {ALIGNMENTS[alignment]}{layout} bf16"
            timed[name] = TimedOperation(("m", "n", "k"), shapes, make, PASSES)
    return timed


def _batched_products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the batched products of eager attention."""
    timed = {}
    for dtype, layout in itertools.product(grid.widths, ("nt", "nn", "tn")):
        make = functools.partial(calls.batched_matmul, layout, DTYPES[dtype])
        timed[f"matmul {BATCHED}{layout} {dtype}"] = TimedOperation(
            ("b", "m", "n", "k"),
            grid.batched_products(),
            make,
            PASSES if dtype == "bf16" and grid.alternates else "",
        )
    return timed


def _grouped_products(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the products of experts, on GPUs and in bf16 only."""
    timed = {}
    for layout in ("nt", "nn", "tn"):
        shapes = [
            (e, n, k, m) if layout == "tn" else (e, m, n, k)
            for e, m, n, k in itertools.product(*grid.grouped)
        ]
        make = functools.partial(calls.grouped_matmul, layout)
        if shapes:
            timed[f"matmul {GROUPED}{layout} bf16"] = TimedOperation(
                ("e", "m", "n", "k"), shapes, make, PASSES
            )
    return timed


def _passes(grid: Grid) -> dict[str, TimedOperation]:
    sizes = [(size,) for size in grid.bytes]
    timed = {"traffic": TimedOperation(("bytes",), sizes, calls.traffic, PRODUCTS)}
    for source, target in (("fp32", "bf16"), ("bf16", "fp32")):
        make = functools.partial(calls.cast, DTYPES[source], DTYPES[target])
        numbers = [(size // 8,) for size in grid.bytes]
        timed[f"cast {source} {target}"] = TimedOperation(("numel",), numbers, make, PRODUCTS)
        make = functools.partial(calls.gradient_sum, DTYPES[source])
        timed[f"gradient sum {source}"] = TimedOperation(("numel",), numbers, make, PRODUCTS)
    return timed


def _elementwise(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the elementwise work of calibrate/passes.py."""
    timed = {}
    for name, direction, dtype in itertools.product(grid.passes, DIRECTIONS, ("bf16", "fp32")):
        if (name, direction) == ("split", "forward"):
            continue  # only views
        make = functools.partial(calls.eager_pass, name, direction == "backward", DTYPES[dtype])
        shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
        other = PRODUCTS if dtype == "bf16" else ""  # in fp32, a GPU holds its clock
        timed[f"{name} {direction} {dtype}"] = TimedOperation(("m", "n"), shapes, make, other)
    if grid.passes:
        numbers = [(size // 8,) for size in grid.bytes]
        timed["residual mixed"] = TimedOperation(("numel",), numbers, calls.residual, PRODUCTS)
        timed["strided copy bf16"] = TimedOperation(
            ("numel",), numbers, calls.strided_copy, PRODUCTS
        )
    for name, direction in itertools.product(grid.compiled_passes, DIRECTIONS):
        make = functools.partial(calls.compiled_pass, name, direction == "backward")
        timed[f"compiled {name} {direction}"] = TimedOperation(
            ("m", "n"), grid.compiled_shapes, make, PRODUCTS
        )
    return timed


def _norms(grid: Grid) -> dict[str, TimedOperation]:
    timed = {}
    for name, direction, dtype in itertools.product(
        ("rmsnorm", "layernorm"), DIRECTIONS, ("bf16", "fp32")
    ):
        make = functools.partial(calls.norm, name, direction == "backward", DTYPES[dtype])
        shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
        timed[f"{name} {direction} {dtype}"] = TimedOperation(("m", "n"), shapes, make, PRODUCTS)
    return timed


def _attentions(grid: Grid) -> dict[str, TimedOperation]:
    """Returns attention. In bf16 it alternates with passes; long shapes are also timed between products,
    which draw so much power that the clock falls.
    """
    timed = {}
    for name, direction, dtype in itertools.product(grid.attentions, DIRECTIONS, ("bf16", "fp32")):
        make = functools.partial(calls.attention, name, direction == "backward", DTYPES[dtype])
        shapes = grid.attention_shapes(name, dtype)
        if not shapes:
            continue
        operation = TimedOperation(("h", "t", "d"), shapes, make)
        full_name = f"attention {name} {direction} {dtype}"
        timed[full_name] = operation
        if dtype == "bf16" and grid.alternates:
            timed[full_name] = operation._replace(alternates_with=PASSES)
            few = [(h, t, d) for h, t, d in shapes if h == 32 and t >= 2048]
            timed[f"{full_name} {ALONE}"] = operation._replace(grid=few, alternates_with=PRODUCTS)
    return timed


def _ends(grid: Grid) -> dict[str, TimedOperation]:
    """Returns the embedding's gradient, the loss and the optimizers."""
    shapes = list(itertools.product(grid.coarse_tokens, grid.coarse_widths))
    timed = {
        "embedding backward": TimedOperation(("m", "n"), shapes, calls.embedding_backward, PRODUCTS)
    }
    # On a CPU, autocast casts logits to fp32 first, which are priced as casts.
    losses = {"cross-entropy": False, "cross-entropy autocast": True}
    for name, direction in itertools.product(losses, DIRECTIONS):
        make = functools.partial(calls.loss, direction == "backward", losses[name])
        if grid.alternates or not losses[name]:
            timed[f"{name} {direction}"] = TimedOperation(("m", "v"), grid.losses(), make, PRODUCTS)
    for name, dtype in itertools.product(grid.optimizers, ("fp32", "bf16")):
        make = functools.partial(calls.optimizer, name, DTYPES[dtype])
        counts = [(number,) for number in grid.parameters]
        timed[f"optimizer {name} {dtype}"] = TimedOperation(("numel",), counts, make)
        if name == "fused":
            timed["optimizer fused master"] = TimedOperation(
                ("numel",), counts, functools.partial(make, master_weights=True)
            )
    return timed
