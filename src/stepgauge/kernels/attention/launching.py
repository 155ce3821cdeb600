"""How attention's kernels are launched: the device, the key that launches are cached under, and the
launch itself.
"""

import functools
import threading
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
    """The GPU's properties that tile sizes and splits depend on. `arch` 0 is the interpreter."""

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
    """A kernel launch in which everything but the tensors' addresses is fixed.

    The first call goes through Triton's launcher, which compiles. That launcher spends 20 us or
    more of host time per call on types, alignments and copy descriptors that the launch key already
    fixes, so later calls pass addresses straight to the driver.

    `boxes` has the position, view and box of each argument that the kernel reads by descriptor.
    `describe` makes a descriptor for Triton's launcher from (tensor, shape, strides, box).
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
        if self.boxes and tensors[0].is_cuda:
            make_context_current(tensors[0].device)
        # Hooks of a profiler run only in Triton's own launcher.
        if self.launch is None or hooks_present():
            self._launch_by_triton(tensors)
            return
        args = [x.data_ptr() for x in tensors]
        for position, shape, strides, box in self.described:
            args[position] = Descriptor(Address(args[position]), shape, strides, box)
        self.launch(self.grid, stream, (*args, *self.tail))

    def _launch_by_triton(self, tensors):
        args = list(tensors)
        for position, shape, strides, box in self.described:
            args[position] = self.describe(tensors[position], shape, strides, box)
        compiled = self.kernel[self.grid](*args, *self.scalars, **self.constants, **self.options)
        if self.launch is None and hasattr(compiled, "packed_metadata"):  # not in the interpreter
            self.launch = launcher_of(compiled)


class View(NamedTuple):
    """The properties of a 4-dimensional tensor that launches depend on. `offset` is its address
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
        """True if the copy engine (TMA) can read the tensor: its address and strides are multiples
        of 16 bytes, and no stride is 0.
        """
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
    # A dimension of length 1 may have any stride, also one that the copy engine does not accept.
    # Replace it by one that it does.
    strides = [s if n > 1 else 16 * shape[-1] for s, n in zip(view.stride, shape, strict=True)]
    strides[-1] = 1
    return shape, strides


def boxes_of(tiles, width, *views):
    """Returns (position, view, box) for a kernel's leading arguments, if it reads them by TMA.

    `views` has pairs of a view and the number of rows in its tiles.
    """
    if not tiles.use_tma:
        return ()
    return tuple((i, view, [1, 1, rows, width]) for i, (view, rows) in enumerate(views))


def with_contiguous_rows(x):
    """Returns x, copied if its head width is not contiguous, as every kernel here needs it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matmul_precision(dtype):
    """Returns Triton's name for the precision of products: "tf32" if torch allows it for float32
    matrix products, "ieee" otherwise.
    """
    if dtype != torch.float32:
        return "ieee"
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if setting == "none":
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return "tf32" if setting == "tf32" else "ieee"


class LaunchKey(NamedTuple):
    """Everything that the launches of a forward or backward depend on, and so their cache key."""

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
    libraries: tuple = ()  # names of the libraries that may run the launch

    @property
    def is_bounded(self):
        """True if a window or packed sequences limit the keys that a query sees."""
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
        """Returns the `input_precision` of the kernels' products."""
        return (
            tiles.fp32_products
            if self.dtype == torch.float32 and self.precision == "ieee"
            else self.precision
        )

    def split(self, kernel, tiles):
        """Returns the number of splits of a kernel's loop, and the rows in each."""
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
        """Returns how many of `num_heads` heads run concurrently.

        A head has `num_tiles` tiles, of which `per_sm` fit on a multiprocessor. Each tile's loop
        reads two tensors of `loop_length` rows, which should stay in L2.
        """
        return heuristics.heads_per_section(
            head_bytes=2 * loop_length * self.q.shape[3] * self.dtype.itemsize,
            l2_bytes=self.chip.l2_bytes,
            num_heads=num_heads,
            least=heuristics.min_heads_per_section(num_tiles, per_sm * self.chip.num_sms)
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


def permanent_copy(device, values):
    """Copies a CPU tensor to the GPU, where it may be kept for the life of the process. The copy is
    complete when this returns.

    A separate thread with its own stream makes the copy: under torch.compile's CUDA graphs, memory
    that the calling thread allocates belongs to the graph and is reused by it.
    """

    def copy():
        stream = _stream_for_copies(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            copied = values.pin_memory().to(torch.device("cuda", device), non_blocking=True)
            stream.synchronize()
        return copied

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy).result()


_this_thread = threading.local()


def make_context_current(device):
    """Gives this thread a CUDA context. A new thread, such as autograd's, has none until its first CUDA
    call. Triton sets one only after it has encoded the descriptors, which needs one.
    """
    if not hasattr(_this_thread, "has_context"):
        torch.zeros(1, device=device)
        _this_thread.has_context = True


def stream_of(x):
    return raw_stream(x.get_device()) if x.is_cuda else None


def on_device(function):
    """Makes the tensors' device current during the call, because Triton launches on that device."""

    @functools.wraps(function)
    def wrapper(x, *args, **kwargs):
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(x, *args, **kwargs)

    return wrapper
