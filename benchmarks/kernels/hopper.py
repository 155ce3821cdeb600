"""Times attention on one Hopper GPU: our kernels, FlashAttention-4 and cuDNN, forward and backward.

    PYTHONPATH=src python benchmarks/kernels/hopper.py OUT [--shapes NAME] [--budget 60] [--trial]
    PYTHONPATH=src python benchmarks/kernels/hopper.py OUT --compile I N [--shapes NAME]

The table of kernels/attention/libraries.py comes from these times. Sets of shapes:

  training  nine shapes of training. Also measures forward and backward together, as users call them,
            and FlashAttention-4's deterministic backward
  grid      widths from 64 to 256, 512 to 65,536 tokens, causal and full masks, grouped heads, windows
            and packed sequences
  ranks     half and a quarter as many heads as in training: those of a tensor-parallel rank

Each result is compared with float64 on one head, or with our kernels if a query does not see all
keys; a wrong result has no time. Appends a line per shape to OUT/attention.jsonl and prints the
table. If the budget ends first, it prints the remaining shapes and exits with status 1. --trial
uses tiny shapes on a CPU.

--compile only calls every N-th shape once, starting with the I-th. N such processes fill the cache
of Triton and, with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, that of FlashAttention-4.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

IS_TRIAL = "--trial" in sys.argv
if IS_TRIAL:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from stepgauge.bench.kernels import comparison  # noqa: E402
from stepgauge.bench.kernels.attention import exact_results  # noqa: E402
from stepgauge.bench.kernels.operation import DTYPES  # noqa: E402
from stepgauge.kernels.attention import (  # noqa: E402
    flash_attention,
    flash_attention_4,
    heuristics,
    libraries,
)
from stepgauge.kernels.attention import triton as kernels  # noqa: E402
from stepgauge.measure.accuracy import largest_error, tolerance  # noqa: E402
from stepgauge.measure.environment import environment  # noqa: E402
from stepgauge.measure.interleaved import time_interleaved  # noqa: E402

DEVICE = torch.device("cpu" if IS_TRIAL else "cuda")
SECONDS = 0.0 if IS_TRIAL else 0.03  # for each pass and library
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape of attention. window and sequences are 0 if there is no window or no packing."""

    batch: int
    heads: int
    length: int
    width: int
    causal: bool = True
    kv_heads: int = 0  # 0: the number of heads
    window: int = 0
    sequences: int = 0  # packed sequences of equal length
    dtype: str = "bf16"

    @property
    def forward_flops(self) -> float:
        """FLOPs as `stepgauge bench` counts them: half of all pairs of query and key if causal; with
        windows or packed sequences only the visible pairs.
        """
        length = self.length // self.sequences if self.sequences else self.length
        pairs = length * length * (self.sequences or 1)
        pairs = pairs / 2 if self.causal else pairs
        if self.window:
            pairs = min(pairs, self.length * self.window * (1 if self.causal else 2))
        return 4 * self.batch * self.heads * pairs * self.width

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else str(self.heads)
        rest = "" if self.causal else " full"
        rest += f" window {self.window}" if self.window else ""
        rest += f" {self.sequences} packed" if self.sequences else ""
        rest += "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"{self.batch} x {heads} x {self.length} x {self.width}{rest}"


TRAINING_SHAPES = [
    Shape(1, 20, 3001, 96),
    Shape(2, 32, 8192, 128, kv_heads=8),
    Shape(2, 16, 8192, 128, dtype="fp16"),
    Shape(16, 32, 2048, 128, kv_heads=8),
    Shape(8, 25, 2048, 64),
    Shape(1, 16, 16384, 64),
    Shape(1, 16, 16384, 128),
    Shape(2, 8, 4096, 256),
    Shape(1, 32, 32768, 128),
]
HEADS = {64: 32, 96: 20, 128: 16, 256: 8}  # for width 2048 and 16,384 tokens
GRID_SHAPES = [
    Shape(1, 16, 32768, 128, window=4096),
    Shape(1, 16, 32768, 128, sequences=16),
    Shape(1, 16, 32768, 64, window=4096),
    Shape(1, 16, 32768, 64, sequences=16),
    Shape(2, 8, 4096, 160),
    *(
        Shape(16384 // length, HEADS[width], length, width)
        for width in (64, 128, 96, 256)
        for length in (4096, 8192, 2048, 1024, 512)
    ),
    Shape(1, 16, 32768, 64),
    *(Shape(1, heads, 16384, width) for width in (64, 128) for heads in (1, 2, 4)),
    Shape(4, 12, 512, 64),
    Shape(4, 32, 512, 80),
    *(Shape(16384 // n, HEADS[d], n, d, causal=False) for d in (64, 128, 96, 256) for n in (8192, 2048, 512)),
    Shape(4, 32, 4096, 64, kv_heads=8),
    Shape(8, 32, 2048, 128, kv_heads=8),
    Shape(4, 16, 8192, 128, window=1024),
    Shape(1, 1, 32768, 64),
    Shape(1, 1, 65536, 128),
]  # fmt: skip
RANK_SHAPES = [
    Shape(1, 16, 8192, 128),
    Shape(1, 8, 8192, 128),
    Shape(1, 8, 16384, 128),
    Shape(1, 16, 4096, 128),
    Shape(2, 16, 4096, 128),
    Shape(4, 16, 2048, 128),
    Shape(1, 16, 8192, 128, kv_heads=4),
    Shape(1, 16, 8192, 64),
    Shape(2, 16, 4096, 64),
    Shape(4, 16, 2048, 64),
    Shape(1, 8, 16384, 64),
    Shape(1, 16, 4096, 64),
]
TRIAL_SHAPES = [
    Shape(1, 2, 32, 16, kv_heads=1, dtype="fp16"),
    Shape(1, 1, 32, 16, window=8, dtype="fp16"),
]
SHAPES = {"training": TRAINING_SHAPES, "grid": GRID_SHAPES, "ranks": RANK_SHAPES}


def all_passes_by(library: str) -> tuple[libraries.Row, ...]:
    """Returns a table in which the library runs everything that it supports."""
    return tuple(
        libraries.Row(library, passes, 1, 256, 1, 1, (), seen)
        for passes in PASSES
        for seen in ("all", "window", "packed")
    )


@contextlib.contextmanager
def run_by(*table: libraries.Row, portable: bool = False) -> Iterator[None]:
    """Runs attention by that table. With `portable`, no Gluon kernels run."""
    before, libraries.TABLE = libraries.TABLE, table
    try:
        with contextlib.ExitStack() as stack:
            if portable:  # any tile override turns Gluon off; no kernel is called "none"
                tiles = heuristics.Tiles(32, 32, 4, 1)
                stack.enter_context(heuristics.override_tiles(none=tiles))
            yield
    finally:
        libraries.TABLE = before


RUN_BY = {
    "ours": run_by,
    "portable": functools.partial(run_by, portable=True),
    **{name: functools.partial(run_by, *all_passes_by(name)) for name in libraries.LIBRARIES},
}


def libraries_for(shape: Shape) -> list[str]:
    """Returns the libraries to measure. The portable kernels are among them only at shapes for which
    Gluon has a kernel and the choice between the two is open.
    """
    has_gluon = (
        shape.width <= 128 and shape.length <= 8192 and not (shape.window or shape.sequences)
    )
    return [name for name in RUN_BY if name != "portable" or has_gluon]


class Case:
    """The tensors of one shape, and for each library that supports it the results and their error."""

    def __init__(self, shape: Shape):
        self.shape, dtype = shape, DTYPES[shape.dtype]
        random = torch.Generator(DEVICE).manual_seed(0)
        query = shape.batch, shape.heads, shape.length, shape.width
        key = shape.batch, shape.kv_heads or shape.heads, shape.length, shape.width
        self.q, self.do, self.k, self.v = (
            torch.randn(size, device=DEVICE, dtype=dtype, generator=random)
            for size in (query, query, key, key)
        )
        ends = torch.arange(shape.sequences + 1, device=DEVICE, dtype=torch.int32)
        self.seen = (
            shape.window,
            ends * (shape.length // shape.sequences) if shape.sequences else None,
        )
        self.scale = shape.width**-0.5
        self.errors: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # o and lse
        self.limit = tolerance(dtype, max(shape.length, shape.width))

    def check(self) -> None:
        """Calls each library once and checks its results."""
        is_seen_whole = not (self.shape.window or self.shape.sequences)
        expected = self._exact() if is_seen_whole else []
        for name in libraries_for(self.shape):
            results = self.first_call(name)
            if not results:
                continue
            expected = expected or self._one_head(results[0], *results[2:])
            self._compare(name, expected, results)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.forward(self.q, self.k, self.v, self.shape.causal, self.scale, *self.seen)

    def backward(self, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return kernels.backward(
            self.do, self.q, self.k, self.v, o, lse, self.shape.causal, self.scale, *self.seen
        )

    def _one_head(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns the last key head and its query heads, of the last sequence in the batch."""
        group = self.q.shape[1] // self.k.shape[1]
        return [x[-1:, -group:] if x.shape[1] == self.q.shape[1] else x[-1:, -1:] for x in tensors]

    def _exact(self) -> list[torch.Tensor]:
        q, do, k, v = self._one_head(self.q, self.do, self.k, self.v)
        group = q.shape[1]
        wide = (x.expand(-1, group, -1, -1) for x in (k, v))
        o, dq, dk, dv = exact_results(q, *wide, do, is_causal=self.shape.causal)
        return [o, dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)]

    def first_call(self, name: str) -> tuple[torch.Tensor, ...]:
        """Returns (o, lse, dq, dk, dv), or () if the library does not support the shape."""
        libraries.calls.clear()
        try:
            with RUN_BY[name]():
                o, lse = self.forward()
                grads = self.backward(o, lse)
        except Exception as error:
            self.notes[name] = f"failed: {type(error).__name__} {error}"[:300]
            return ()
        ran = {library for _, library in libraries.calls}
        if name in libraries.LIBRARIES and (ran != {name} or len(libraries.calls) < 2):
            self.notes[name] = "not taken"
            return ()
        return o, lse, *grads

    def _compare(
        self, name: str, expected: list[torch.Tensor], results: tuple[torch.Tensor, ...]
    ) -> None:
        o, lse, *grads = results
        errors = [largest_error(expected, self._one_head(o, *grads))]
        if "ours" in self.kept:
            errors.append(float((lse - self.kept["ours"][1]).abs().max()))
        self.errors[name] = max(errors)
        if self.errors[name] < self.limit:
            self.kept[name] = o, lse
        else:
            self.notes[name] = f"wrong by {self.errors[name]:.1e}"

    def times(self) -> dict[str, dict[str, list[float]]]:
        """Returns {pass: {library: ms}} of the libraries with correct results."""
        calls: dict[str, dict[str, Callable]] = {
            "forward": dict.fromkeys(self.kept, self.forward),
            "backward": {name: functools.partial(self.backward, *kept) for name, kept in self.kept.items()},
        }  # fmt: skip
        if self.shape in TRAINING_SHAPES and "fa4" in self.kept:
            calls["backward"]["fa4 deterministic"] = self._deterministic()
        return {passes: _timed(each, RUN_BY) for passes, each in calls.items()}

    def _deterministic(self) -> Callable:
        o, lse = self.kept["fa4"]
        tensors = [x.transpose(1, 2) for x in (self.q, self.k, self.v, o, self.do)]
        return functools.partial(
            flash_attention_4._interface()._flash_attn_bwd, *tensors, lse,
            softmax_scale=self.scale, causal=self.shape.causal, deterministic=True,
        )  # fmt: skip

    def both(self) -> dict[str, list[float]]:
        """Times forward and backward together as users call them: the library chosen by the table, our
        kernels, and the peers.
        """
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))

        def fa4(q, k, v):
            across = (x.transpose(1, 2) for x in (q, k, v))
            function = flash_attention_4._interface().flash_attn_func
            return function(*across, causal=self.shape.causal)[0].transpose(1, 2)

        def sdpa(q, k, v):
            grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, **grouped)

        ours = functools.partial(flash_attention, is_causal=self.shape.causal)
        functions = {"by the table": ours, "ours": ours, "cudnn itself": sdpa}
        if "fa4" in self.kept:
            functions["fa4 itself"] = fa4
        contexts = {
            "by the table": contextlib.nullcontext,
            "ours": run_by,
            "cudnn itself": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        }
        calls = {
            name: functools.partial(
                lambda run: torch.autograd.grad(run(q, k, v), (q, k, v), self.do), function
            )
            for name, function in functions.items()
        }
        libraries.calls.clear()
        calls["by the table"]()
        self.notes["by the table"] = ", ".join(map(" ".join, libraries.calls)) or "ours"
        return _timed(calls, contexts)


def _timed(calls: dict[str, Callable], contexts: dict[str, Callable]) -> dict[str, list[float]]:
    present = {name: contexts[name] for name in calls if name in contexts}
    times, failures = time_interleaved(calls, DEVICE, seconds=SECONDS, around=present)
    for name, error in failures.items():
        print(f"  {name}: {type(error).__name__} {error}"[:300], flush=True)
    return {name: values for name, values in times.items() if name not in failures and values}


def measured(shape: Shape) -> dict:
    """Checks and times one shape. Returns its row."""
    case = Case(shape)
    case.check()
    times = case.times()
    if shape in (*TRAINING_SHAPES, TRIAL_SHAPES[0]):
        times["both"] = case.both()
    return {
        "shape": dataclasses.asdict(shape),
        "forward_flops": shape.forward_flops,
        "ms": {passes: {n: statistics.median(t) for n, t in each.items()} for passes, each in times.items()},
        "fastest_ms": {passes: {n: min(t) for n, t in each.items()} for passes, each in times.items()},
        "errors": case.errors,
        "notes": case.notes,
    }  # fmt: skip


def described(row: dict) -> str:
    """Returns the row as text: ms and TFLOP/s of each library, with * at the fastest."""
    lines = [
        str(Shape(**row["shape"])) + "".join(f"; {n} {note}" for n, note in row["notes"].items())
    ]
    for passes, each in row["ms"].items():
        factor = {"forward": 1.0, "backward": 2.5, "both": 3.5}[passes]
        rates = {name: row["forward_flops"] * factor / ms / 1e9 for name, ms in each.items()}
        best = min(each, key=each.get) if each else ""
        figures = (
            f"{'*' if n == best else ''}{n} {ms:.4g} ({rates[n]:.0f})" for n, ms in each.items()
        )
        lines.append(f"    {passes:8} {'  '.join(figures)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", choices=SHAPES, default="training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all shapes")
    parser.add_argument("--trial", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument(
        "--compile",
        nargs=2,
        type=int,
        metavar=("I", "N"),
        help="only compile every N-th shape, from the I-th on",
    )
    options = parser.parse_args()
    shapes = TRIAL_SHAPES if IS_TRIAL else SHAPES[options.shapes]
    if options.compile:
        first, step = options.compile
        for shape in shapes[first::step]:
            case = Case(shape)
            for name in libraries_for(shape):
                case.first_call(name)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    versions = comparison._versions(comparison.PEER_PACKAGES)
    rows = options.out / "attention.jsonl"
    with rows.open("a") as file:
        file.write(json.dumps({"environment": environment(DEVICE), "peers": versions}) + "\n")
    for number, shape in enumerate(shapes):
        if time.monotonic() > end:
            print("no time left for", "; ".join(map(str, shapes[number:])))
            return 1
        row = measured(shape)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(described(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
