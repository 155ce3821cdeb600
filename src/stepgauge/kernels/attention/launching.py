"""How attention's kernels are launched: the device, the key (all that a launch depends on), and
the launch itself.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton

from stepgauge.kernels.launch import hooks_present, raw_stream
from stepgauge.kernels.launch.triton_internals import Address, Descriptor, launcher_of

from . import heuristics, libraries

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # pragma: no cover - a Triton without host descriptors: plain pointers only
    TensorDescriptor = None


class Device(NamedTuple):
    """What the choices depend on. `arch` 0 stands for the interpreter."""

    arch: int
    num_sms: int
    l2_bytes: int


@functools.cache
def device_of(index):
    if index is None:
        return Device(arch=0, num_sms=1, l2_bytes=1 << 25)
    properties = torch.cuda.get_device_properties(index)
    return Device(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.L2_cache_size,
    )


class PlannedLaunch:
    """One kernel with everything but the tensors' addresses fixed.

    The first call goes through Triton's own launcher, which compiles. That launcher spends 20 us
    and more of host time a call on types, alignments and copy descriptors that the plan's key fixes
    already, so later calls hand the driver addresses. `boxes`: for each argument that the kernel
    reads by descriptor, its position, view and box. `describe` makes the descriptor that Triton's
    own launcher takes of (tensor, shape, strides, box).
    """

    def __init__(
        self,
        kernel,
        grid,
        scalars,
        constants,
        tiles=None,
        boxes=(),
        options=None,
        describe=TensorDescriptor,
    ):
        self.kernel, self.grid, self.scalars, self.constants, self.boxes = (
            kernel,
            grid,
            scalars,
            constants,
            boxes,
        )
        self.describe = describe
        self.described = [(position, *tma_shape(view), box) for position, view, box in boxes]
        self.options = options or {"num_warps": 4}
        if tiles is not None:
            self.options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        # A tensor among the scalars is the same at every call.
        words = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in scalars)
        self.tail = (*words, *constants.values())
        self.launch = None

    def __call__(self, stream, *tensors):
        # a profiler that hooks launches sees them in Triton's launcher only
        if self.launch is None or hooks_present():
            self._by_triton(tensors)
            return
        given = [x.data_ptr() for x in tensors]
        for position, shape, strides, box in self.described:
            given[position] = Descriptor(Address(given[position]), shape, strides, box)
        self.launch(self.grid, stream, (*given, *self.tail))

    def _by_triton(self, tensors):
        given = list(tensors)
        for position, shape, strides, box in self.described:
            given[position] = self.describe(tensors[position], shape, strides, box)
        compiled = self.kernel[self.grid](*given, *self.scalars, **self.constants, **self.options)
        if self.launch is None and hasattr(compiled, "packed_metadata"):  # not in the interpreter
            self.launch = launcher_of(compiled)


class View(NamedTuple):
    """The part of a 4-dimensional tensor's description that launches depend on. `offset`: address
    modulo 16.
    """

    shape: tuple
    stride: tuple
    offset: int

    @staticmethod
    def of(x):
        return View(x.shape, x.stride(), x.data_ptr() % 16)

    @property
    def steps(self):
        return self.stride[:3]

    def tma_reads(self, itemsize):
        """Whether the copy engine can read it: base and strides in 16-byte steps, none of them 0."""
        strides = [
            stride
            for stride, length in zip(self.stride[:3], self.shape[:3], strict=True)
            if length > 1
        ]
        return self.offset == 0 and all(
            stride > 0 and stride * itemsize % 16 == 0 for stride in strides
        )


def tma_shape(view):
    shape = list(view.shape)
    # A dimension of length 1 may carry any stride, one that the copy engine refuses too: give it
    # one that it takes.
    strides = [s if n > 1 else 16 * shape[-1] for s, n in zip(view.stride, shape, strict=True)]
    strides[-1] = 1
    return shape, strides


def boxes_of(tiles, width, *views):
    """(position, view, box) of leading arguments of a kernel; a view comes with the tile edge that
    it is read by.
    """
    if not tiles.use_tma:
        return ()
    return tuple((i, view, [1, 1, rows, width]) for i, (view, rows) in enumerate(views))


def rows_last(x):
    """x with the head width contiguous, as every kernel here reads it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matmul_precision(dtype):
    """Triton's name for how float32 products are made: true float32 unless torch allows tf32 for
    its own.
    """
    if dtype != torch.float32:
        return "ieee"
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if setting == "none":
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return "tf32" if setting == "tf32" else "ieee"


class LaunchKey(NamedTuple):
    """Everything that a forward's or backward's launches depend on: the key they are cached under."""

    device: int | None
    dtype: torch.dtype
    q: View
    k: View
    v: View
    is_causal: bool
    scale: float
    precision: str
    overrides: tuple
    num_splits: int | None
    o: View | None = None
    do: View | None = None
    window: int = 0
    is_packed: bool = False
    libraries: tuple = ()  # that may take what the table gives them

    @property
    def is_bounded(self):
        """Whether a query sees some of the keys only, beside the causal mask."""
        return self.window > 0 or self.is_packed

    @property
    def chip(self):
        return device_of(self.device)

    @property
    def width(self):
        return heuristics.block_width(self.q.shape[3])

    @property
    def group(self):
        return self.q.shape[1] // self.k.shape[1]

    def tiles(self, kernel):
        arch = self.chip.arch
        views = [view for view in (self.q, self.k, self.v, self.do) if view is not None]
        tma = arch >= 90 and TensorDescriptor is not None
        return heuristics.select_tiles(
            kernel,
            arch=arch,
            itemsize=self.dtype.itemsize,
            head_width=self.q.shape[3],
            is_causal=self.is_causal,
            is_bounded=self.is_bounded,
            tma=tma and all(view.tma_reads(self.dtype.itemsize) for view in views),
        )

    def products(self, tiles):
        """The `input_precision` of the kernels' products."""
        return (
            tiles.fp32_products
            if self.dtype == torch.float32 and self.precision == "ieee"
            else self.precision
        )

    def split(self, kernel, tiles):
        """(number of splits, rows in each) of a kernel's loop."""
        over_queries = kernel == "dkdv"
        num_queries, num_keys = self.q.shape[2], self.k.shape[2]
        length = num_queries if over_queries else num_keys
        if self.is_bounded:
            return 1, length
        number = self.num_splits or heuristics.choose_num_splits(
            kernel,
            tiles,
            num_heads=self.q.shape[0] * (self.k.shape[1] if over_queries else self.q.shape[1]),
            num_queries=num_queries,
            num_keys=num_keys,
            head_width=self.q.shape[3],
            itemsize=self.dtype.itemsize,
            num_sms=self.chip.num_sms,
            is_causal=self.is_causal,
        )
        chunk = heuristics.chunk_length(length, number, max(tiles.block_q, tiles.block_k))
        return triton.cdiv(length, chunk), chunk

    def section(self, loop_length, *, num_heads, num_tiles, per_sm=1):
        """How many of `num_heads` run side by side, each in `num_tiles` tiles, `per_sm` of these on
        a multiprocessor.

        Two tensors of `loop_length` rows are read over and over for each.
        """
        return heuristics.heads_per_section(
            head_bytes=2 * loop_length * self.q.shape[3] * self.dtype.itemsize,
            l2_bytes=self.chip.l2_bytes,
            num_heads=num_heads,
            least=heuristics.heads_beside_longest(num_tiles, per_sm * self.chip.num_sms)
            if self.is_causal
            else 1,
        )


def launch_key(
    q, k, v, is_causal, scale, num_splits, o=None, do=None, *, window=0, is_packed=False
):
    of, dtype = View.of, q.dtype
    return LaunchKey(
        q.get_device() if q.is_cuda else None, dtype, of(q), of(k), of(v), is_causal, scale, matmul_precision(dtype),
        heuristics.overrides(), num_splits, None if o is None else of(o), None if do is None else of(do),
        window, is_packed, libraries.allowed(),
    )  # fmt: skip


@functools.cache
def _stream_for_copies(device):
    return torch.cuda.Stream(device)


def kept_on(device, values):
    """A copy on the GPU that may be kept for good, ready when this returns.

    Made by a thread with a stream of its own: under torch.compile's CUDA graphs what the calling
    thread allocates is the graph's, which takes it back.
    """

    def make():
        stream = _stream_for_copies(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            made = values.pin_memory().to(torch.device("cuda", device), non_blocking=True)
            stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def stream_of(x):
    return raw_stream(x.get_device()) if x.is_cuda else None


def on_device(function):
    """Triton launches on the current device: make it the tensors' own."""

    @functools.wraps(function)
    def wrapper(x, *args, **kwargs):
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(x, *args, **kwargs)

    return wrapper
