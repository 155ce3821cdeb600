"""Attention's path in C++, built here with Python functions in the place of the driver's.

What C++ launches is compared, argument by argument, with what the path in Python launches for the
same call.
"""

import contextlib
import ctypes
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from tests.kernels import driver_here
from tests.kernels.driver_here import addresses, needs_compiler

from stepgauge.kernels import attention
from stepgauge.kernels.attention import extension, flash_attention, heuristics

kernels = pytest.importorskip("stepgauge.kernels.attention.triton")
launching = pytest.importorskip("stepgauge.kernels.attention.launching")
bf16x3 = pytest.importorskip("stepgauge.kernels.attention.bf16x3")
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(kernels.interpreting(), reason="the interpreter launches nothing"),
]

HOPPER = launching.Device(arch=90, num_sms=132, l2_bytes=1 << 25)
REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
BF16 = torch.bfloat16
VALUES = {"o": 3.0, "dq": 4.0, "dk": 5.0, "dv": 6.0}


class Descriptor(bytes):
    """128 bytes that begin with the address and go on with what else the descriptor says."""

    @classmethod
    def of(cls, address, *rest):
        return cls(struct.pack("<Q", address) + repr(rest).encode()[:120].ljust(120))


def address_in(descriptor):
    return int.from_bytes(descriptor[:8], "little")


class Driver(driver_here.Driver):
    """The driver's functions. `launches` are (function, grid, threads, shared, stream, arguments)."""

    def __init__(self, module):
        super().__init__()
        self.known = {}
        self.functions = (*self.functions, REPLACE(self.replace))
        module.configure(*addresses(self.functions))

    def replace(self, descriptor, address):
        ctypes.c_uint64.from_address(descriptor).value = address
        return 0

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        if self.statuses:
            return self.statuses.pop(0)
        types, outs = self.known[function]
        sizes = [128 if kind == "descriptor" else 8 for kind in types]
        raw = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
        arguments = [each if len(each) == 128 else int.from_bytes(each, "little") for each in raw]
        self.launches.append((function, (gx, gy, gz), bx, shared, stream, arguments))
        for position, (like, value) in outs.items():
            where = arguments[position]
            address = where if isinstance(where, int) else address_in(where)
            memory = (ctypes.c_char * like.nbytes).from_address(address)
            torch.frombuffer(memory, dtype=like.dtype).fill_(value)
        return 0


@pytest.fixture(scope="module")
def library():
    return extension.NATIVE.build()


@pytest.fixture
def cpp(library, tmp_path, monkeypatch):
    """The module with plans of its own, called by flash_attention as on a GPU; caches are as they
    were afterwards.
    """
    module = extension.NATIVE.imported(shutil.copy(library, tmp_path))
    monkeypatch.setattr(extension.NATIVE, "module", module)
    monkeypatch.setattr(extension.NATIVE, "problem", None)
    monkeypatch.setattr(extension, "_offered", set())
    monkeypatch.setattr(extension, "cuda_context", lambda: 4321)
    monkeypatch.setattr(extension, "descriptor_bytes", bytes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launching, "device_of", lambda index: HOPPER)
    caches = (kernels._plan_forward, kernels._plan_dq, kernels._plan_dkdv, bf16x3.cut_launch)
    for cached in caches:
        cached.cache_clear()
    yield module
    for cached in caches:
        cached.cache_clear()


def make(layout, shape, dtype=BF16):
    """q, k, v and do: each by itself, or as a model has them, (B, T, H, D) in one tensor and
    transposed.
    """
    torch.manual_seed(0)
    batch, heads, length, width = shape
    if layout == "contiguous":
        return [torch.randn(shape, dtype=dtype).requires_grad_(i < 3) for i in range(4)]
    together = torch.randn(batch, length, 3, heads, width, dtype=dtype)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in together.unbind(2))
    return [q, k, v, torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2)]


def described(self, position, address):
    """Launch.described without a driver."""
    view, box = next((view, box) for at, view, box in self.boxes if at == position)
    shape, strides = launching.tma_shape(view)
    return [Descriptor.of(address, shape, strides, box), *shape, *strides]


class Both:
    """One kind of call, its kernels prepared as if compiled, and launched in Python and in C++.

    Unless `num_splits` is given the forward is the one in Gluon, if the type has 16 bits.
    """

    def __init__(
        self,
        module,
        monkeypatch,
        layout="contiguous",
        num_splits=1,
        is_causal=True,
        width=64,
        dtype=BF16,
    ):
        self.driver = Driver(module)
        self.python = []
        self.is_causal, self.num_splits = is_causal, num_splits
        is_split = (num_splits or 1) > 1
        heads = 3 if num_splits else 34  # so many that each multiprocessor has a tile
        self.q, self.k, self.v, self.do = make(layout, (2, heads, 160, width), dtype)
        self.scale = self.q.shape[-1] ** -0.5
        monkeypatch.setattr(launching.PlannedLaunch, "described", described)
        self.kept = []
        for name in ("empty", "empty_like"):  # so that no address is given twice
            original = getattr(torch, name)

            def keeping(*args, original=original, **options):
                self.kept.append(original(*args, **options))
                return self.kept[-1]

            monkeypatch.setattr(torch, name, keeping)
        self.o = o = torch.empty_like(self.q).detach()
        self.lse = torch.zeros(o.shape[:3])
        self.case = launching.launch_key(
            self.q, self.k, self.v, is_causal, self.scale, num_splits, o=o
        )
        self.back = self.case._replace(do=launching.View.of(self.do))
        self.forward = kernels._plan_forward(self.case)
        steps = [torch.empty_like(x).stride()[:3] for x in (self.q, self.k, self.v)]
        self.dq = kernels._plan_dq(self.back, steps[0])
        self.dkdv = kernels._plan_dkdv(self.back, *steps[1:])
        lse = self.lse, 7.0
        o, dq, dk, dv = ((self.q, VALUES[name]) for name in ("o", "dq", "dk", "dv"))
        self._prepare(self.forward.main, 5, {} if is_split else {3: o, 4: lse})
        self._prepare(self.dq.main, 8, {} if is_split else {7: dq})
        for launch in self.dkdv.mains:
            self._prepare(launch, 8, {} if is_split else {6: dk, 7: dv})
        if bf16x3.takes(self.back):
            self._prepare(bf16x3.cut_launch(self.back), 10, {})
        if is_split:
            self._prepare(self.forward.combine, 4, {2: o, 3: lse})
            self._prepare(self.dq.reduce, 3, {1: dq})
            self._prepare(self.dkdv.reduce, 3, {1: dk, 2: dv})

    @staticmethod
    def moved(descriptor, address):
        return struct.pack("<Q", address) + descriptor[8:]

    def _prepare(self, launch, num_tensors, outs):
        boxed = {position: (view, box) for position, view, box in launch.boxes}
        tensors = [
            f"tensordesc<bf16{boxed[i][1]}>" if i in boxed else "*bf16" for i in range(num_tensors)
        ]
        kinds = {float: "fp32", int: "i32", torch.Tensor: "*i32", type(None): "constexpr"}
        scalars = [kinds[type(value)] for value in launch.scalars]
        types = [*tensors, *scalars, *["constexpr"] * len(launch.constants)]
        function = len(self.driver.known) + 1
        metadata = SimpleNamespace(num_warps=launch.options["num_warps"], shared=100 * function)
        signature = dict(zip(launch.kernel.arg_names, types, strict=True))
        launch.binary = SimpleNamespace(
            src=SimpleNamespace(signature=signature), metadata=metadata, function=function
        )
        launch.expand = dict.fromkeys(boxed, "something")
        expanded = []
        for kind in types:
            expanded += (
                ["descriptor", *["i32"] * 4, *["i64"] * 4]
                if kind.startswith("tensordesc")
                else [kind]
            )
        passed = [kind for kind in expanded if kind != "constexpr"]
        at = {i: sum(9 if j in boxed else 1 for j in range(i)) for i in outs}
        self.driver.known[function] = passed, {at[i]: out for i, out in outs.items()}

        def launched(grid, stream, flat):
            words = [
                _word(kind, value)
                for kind, value in zip(expanded, flat, strict=True)
                if kind != "constexpr"
            ]
            self.python.append((function, grid, 32 * metadata.num_warps, metadata.shared, words))

        launch.launch = launched

    def offer(self):
        q, k, v = self.q, self.k, self.v
        kernels._offer_forward(
            self.case, self.forward, q, k, v, q.numel(), q.numel() // q.shape[-1]
        )
        kernels._offer_backward(self.back, self.dq, self.dkdv, q, k, v, self.do, self.o)
        assert extension.NATIVE.problem is None, extension.NATIVE.problem

    def in_python(self):
        args = self.is_causal, self.scale
        inputs = [x.detach() for x in (self.q, self.k, self.v)]
        o, lse = kernels.forward(*inputs, *args, num_splits=self.num_splits)
        kernels.backward(self.do, *inputs, o, lse, *args, num_splits=self.num_splits)


def _word(kind, value):
    if kind == "descriptor":
        return bytes(value)
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return value if kind in ("i64",) or kind.startswith("*") else value & 0xFFFFFFFF


def is_address(argument):
    return isinstance(argument, int) and argument > 1 << 33


def in_order(launches):
    """Addresses numbered as they first appear, so that two runs with memory of their own can be
    compared.
    """
    numbers, out = {}, []
    for function, grid, threads, shared, arguments in launches:
        named = []
        for argument in arguments:
            if isinstance(argument, bytes):
                argument = (
                    "descriptor",
                    numbers.setdefault(address_in(argument), len(numbers)),
                    argument[8:],
                )
            elif is_address(argument):
                argument = ("address", numbers.setdefault(argument, len(numbers)))
            named.append(argument)
        out.append((function, grid, threads, shared, named))
    return out


@pytest.fixture
def both(cpp, monkeypatch):
    def build(**options):
        made = Both(cpp, monkeypatch, **options)
        monkeypatch.setattr(extension.NATIVE, "call", cpp.attention)
        return made

    return build


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("num_splits", [None, 1, 2])
def test_cpp_launches_what_python_launches(both, num_splits, layout, is_causal):
    here = both(layout=layout, num_splits=num_splits, is_causal=is_causal)
    in_gluon = kernels.hopper is not None and num_splits is None
    assert here.forward.main.kernel is (kernels.hopper if in_gluon else kernels).forward_kernel
    launches = assert_same_launches(here, num_splits or 1)
    # two halves of one temporary, as far apart: o's and lse's parts, then dk's and dv's
    if num_splits == 2:
        for launch, last in ((0, -1), (4, -1)):
            cpp, python = (
                [a for a in side[launch][-1] if is_address(a)] for side in (launches, here.python)
            )
            assert cpp[last] - cpp[last - 1] == python[last] - python[last - 1] > 0


@pytest.mark.skipif(kernels.hopper is None, reason="needs a Triton with Gluon")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_cpp_launches_the_backward_in_gluon(both, layout, width):
    from stepgauge.kernels.attention import hopper_dkdv, hopper_dq

    here = both(layout=layout, num_splits=None, width=width)
    assert here.dkdv.main.kernel is hopper_dkdv.dkdv_kernel
    assert here.dq.main.kernel is (hopper_dq if width == 128 else kernels).dq_kernel
    assert_same_launches(here, 1)


def assert_same_launches(here, parts, function=flash_attention, more=0):
    """C++'s, which must give the same as Python's: compared by argument, and by what stands in the
    results.
    """
    here.in_python()
    assert len(here.python) == 3 * parts + more
    here.offer()
    o = function(here.q, here.k, here.v, is_causal=here.is_causal)
    o.backward(here.do)
    launches = [each[:4] + each[5:] for each in here.driver.launches]
    assert {each[4] for each in here.driver.launches} == {1234}
    for passes in (slice(0, parts), slice(parts, None)):  # memory is free again between the two
        assert in_order(launches[passes]) == in_order(here.python[passes])
    got = {"o": o, "dq": here.q.grad, "dk": here.k.grad, "dv": here.v.grad}
    assert {name: set(x.flatten().tolist()) for name, x in got.items()} == {
        n: {v} for n, v in VALUES.items()
    }
    assert o.stride() == torch.empty_like(here.q).stride() and o.grad_fn is not None
    return launches


@pytest.fixture
def operators_here(monkeypatch):
    """What torch.compile sees on a GPU: the operators, for tensors of the CPU. Counts what was left
    to Python.
    """
    left = []
    monkeypatch.setattr(attention, "_has_kernels", lambda device: True)

    def watched():
        left.append("kernels")
        return kernels

    monkeypatch.setattr(attention.operator, "kernels", watched)
    return left


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_compiled_graph_launches_from_cpp(both, cpp, operators_here, num_splits):
    here = both(layout="transposed", num_splits=num_splits)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    assert_same_launches(here, num_splits, compiled)
    assert operators_here == [] and cpp.calls() == (2, 2)  # Python asks for each pass


def test_operators_make_no_node_and_are_seen_by_modes(both, cpp, operators_here):
    from torch.utils.flop_counter import FlopCounterMode

    here = both()
    here.offer()
    q, k, v = inputs = [here.q, here.k, here.v]
    with torch.no_grad():
        o, lse = torch.ops.stepgauge.flash_attention(*inputs, True, here.scale)
    assert o.grad_fn is lse.grad_fn is None and not o.requires_grad and o.eq(VALUES["o"]).all()
    with torch.inference_mode():
        torch.ops.stepgauge.flash_attention(*inputs, True, here.scale)
    with FlopCounterMode(display=False) as counter:
        o, lse = torch.ops.stepgauge.flash_attention(*inputs, True, here.scale)
        o.backward(here.do)
    assert counter.get_total_flops() == 14 * q.numel() * k.shape[2]
    assert lse.grad_fn is None and not lse.requires_grad and q.grad.eq(VALUES["dq"]).all()
    assert v.grad.grad_fn is None and operators_here == [] and cpp.calls() == (4, 4)


def test_operators_pass_torchs_own_checks(both, operators_here):
    here = both()
    here.offer()
    inputs = [x.detach().requires_grad_() for x in (here.q, here.k, here.v)]
    torch.library.opcheck(torch.ops.stepgauge.flash_attention.default, (*inputs, True, here.scale))
    tensors = [x.detach() for x in (here.do, *inputs, here.o)]
    backward = torch.ops.stepgauge.flash_attention_backward.default
    torch.library.opcheck(backward, (*tensors, here.lse, True, here.scale))
    assert operators_here == []


def test_what_operators_leave_to_python(both, cpp):
    here = both()
    here.offer()
    q, k, v, do, o, lse = (x.detach() for x in (here.q, here.k, here.v, here.do, here.o, here.lse))
    assert cpp.forward(q, k, v, True, here.scale) is not None
    assert cpp.backward(do, q, k, v, o, lse, True, here.scale) is not None
    # copied
    assert cpp.backward(do[..., :1].expand_as(do), q, k, v, o, lse, True, here.scale) is not None
    turned = o.transpose(1, 2).contiguous().transpose(1, 2)
    shorter = torch.randn(2, 3, 159, 64, dtype=BF16)
    declined = {
        "another mask": (do, q, k, v, o, lse, False, here.scale),
        "another scale": (do, q, k, v, o, lse, True, 0.5),
        "other strides of the gradient": (turned, q, k, v, o, lse, True, here.scale),
        "other strides of the output": (do, q, k, v, turned, lse, True, here.scale),
        "another length of the output": (do, q, k, v, shorter, lse, True, here.scale),
        "another length of the gradient": (shorter, q, k, v, o, lse, True, here.scale),
        "keys and values differ": (do, q, k, shorter, o, lse, True, here.scale),
        "sums of another type": (do, q, k, v, o, lse.double(), True, here.scale),
        "sums that do not lie together": (do, q, k, v, o, lse.mT.contiguous().mT, True, here.scale),
        "sums of another length": (do, q, k, v, o, lse[..., 1:].contiguous(), True, here.scale),
    }
    for name, arguments in declined.items():
        assert cpp.backward(*arguments) is None, name
    assert cpp.forward(q, k, shorter, True, here.scale) is None
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert cpp.forward(q, k, v, True, here.scale) is None
        assert cpp.backward(do, q, k, v, o, lse, True, here.scale) is None
    assert cpp.calls() == (3 + len(declined) + 3, 3)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    "layout, width",
    [("contiguous", 64), ("transposed", 64), ("contiguous", 32), ("transposed", 128)],
)
def test_cpp_launches_what_python_launches_in_float32(both, layout, num_splits, width):
    here = both(layout=layout, num_splits=num_splits, dtype=torch.float32, width=width)
    assert here.forward.main.constants["PRECISION"] == "bf16x6"
    is_bf16x3 = {32: 0, 64: 1, 128: 2}[width]  # beside the three: the cut, and dk and dv apart
    assert_same_launches(here, num_splits, more=is_bf16x3)


_MATMULS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@contextlib.contextmanager
def float32_products(setting):
    """As the one or the other of torch's settings makes them."""
    of_all, places = torch.get_float32_matmul_precision(), (torch.backends, *_MATMULS)
    before = [place.fp32_precision for place in places]
    try:
        setting()
        yield
    finally:  # torch refuses to tell a mixture of its older setting and its newer ones
        torch.backends.fp32_precision = before[0]
        torch.set_float32_matmul_precision(of_all)
        for place, precision in zip(_MATMULS, before[1:], strict=True):
            place.fp32_precision = precision
        assert torch.get_float32_matmul_precision() == of_all


SETTINGS = {
    "nothing": lambda: None,
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "not allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "of cuda": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "of cuda, ieee": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    "of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("now", SETTINGS)
@pytest.mark.parametrize("then", ["nothing", "allow_tf32"])
def test_float32_is_launched_as_products_are_made_now(both, cpp, then, now):
    """A program that was offered under one precision serves under that one alone, in both passes."""
    with float32_products(SETTINGS[then]):
        here = both(dtype=torch.float32)
        offered = here.case.precision
        here.offer()
    q, k, v, do, o, lse = (x.detach() for x in (here.q, here.k, here.v, here.do, here.o, here.lse))
    with float32_products(SETTINGS[now]):
        is_same = launching.matmul_precision(torch.float32) == offered
        assert (cpp.attention(q, k, v, True, None) is not None) == is_same
        assert (cpp.forward(q, k, v, True, here.scale) is not None) == is_same
        assert (cpp.backward(do, q, k, v, o, lse, True, here.scale) is not None) == is_same


def test_backward_looks_at_its_own_time(both, monkeypatch):
    asked = []
    here = both(dtype=torch.float32)
    here.offer()
    monkeypatch.setattr(kernels, "backward", lambda *args: asked.append(args) or args[1:4])
    o = flash_attention(here.q, here.k, here.v, is_causal=True)
    assert here.driver.launches and not asked
    with float32_products(SETTINGS["allow_tf32"]):
        o.backward(here.do)
    assert len(asked) == 1


def test_16_bit_is_the_same_under_every_precision(both, cpp):
    here = both()
    here.offer()
    with float32_products(SETTINGS["allow_tf32"]):
        assert (
            cpp.attention(here.q.detach(), here.k.detach(), here.v.detach(), True, None) is not None
        )


def test_inputs_elsewhere_get_their_own_addresses(both):
    here = both()
    here.offer()
    other = [x.detach().clone().requires_grad_() for x in (here.q, here.k, here.v)]
    with torch.no_grad():
        assert not flash_attention(*other, is_causal=True).requires_grad
    words = here.driver.launches[0][-1]
    starts = [address_in(each) for each in words if isinstance(each, bytes)]
    assert starts == [x.data_ptr() for x in other]


def test_what_cpp_leaves_to_python(both, cpp):
    from torch.utils.flop_counter import FlopCounterMode

    class Subclass(torch.Tensor):
        pass

    here = both()
    here.offer()
    q, k, v = (x.detach() for x in (here.q, here.k, here.v))
    call = lambda q, k, v, *rest: cpp.attention(q, k, v, *(rest or (True, None)))  # noqa: E731
    assert call(q, k, v) is not None
    assert call(q, k, v, True, here.scale) is not None
    unaligned = torch.randn(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    longer = torch.randn(2, 3, 161, 64, dtype=BF16)
    declined = {
        "another type": (q.float(), k.float(), v.float()),
        "mixed types": (q, k.half(), v),
        "unaligned": (unaligned, k, v),
        "other strides": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        "another length": (longer, k, v),
        "keys and values differ": (q, k, longer),
        "subclass": (q.as_subclass(Subclass), k, v),
        "three dimensions": (q[0], k[0], v[0]),
        "head width not contiguous": (q.mT, k.mT, v.mT),
    }
    for name, tensors in declined.items():
        assert call(*tensors) is None, name
    assert call(q, k, v, False, None) is None  # another mask
    assert call(q, k, v, True, 0.5) is None
    with FlopCounterMode(display=False):
        assert call(q, k, v) is None
    with torch.autocast("cpu", torch.float16):
        assert call(q, k, v) is None
    with torch.autocast("cpu", BF16):
        assert call(q, k, v) is not None
    seen = []
    torch.func.vmap(lambda row: seen.append(call(row[None], k[:1], v[:1])) or row)(q)
    assert seen == [None]
    assert len(here.driver.launches) == 3


def test_own_tiles_and_hooks_are_not_passed_by(both, monkeypatch):

    here = both()
    here.offer()
    # the plain version serves here
    monkeypatch.setattr(attention, "_has_kernels", lambda device: False)
    q, k, v = (x.detach() for x in (here.q, here.k, here.v))
    flash_attention(q, k, v, is_causal=True)
    assert len(here.driver.launches) == 1
    with heuristics.override_tiles(forward=heuristics.Tiles(64, 64, 4, 2)):
        flash_attention(q, k, v, is_causal=True)
    monkeypatch.setattr(attention.operator, "hooks_present", lambda: True)
    flash_attention(q, k, v, is_causal=True)
    assert len(here.driver.launches) == 1


def test_gradients_that_cpp_does_not_know_go_to_the_operator(both, monkeypatch):
    asked = []

    def backward(grad, q, k, v, o, lse, *rest):
        asked.append((grad.stride(), rest))
        return tuple(torch.full_like(x, 7.0) for x in (q, k, v))

    here = both()
    monkeypatch.setattr(kernels, "backward", backward)
    here.offer()
    turned = here.do.transpose(1, 2).contiguous().transpose(1, 2)
    flash_attention(here.q, here.k, here.v, is_causal=True).backward(turned)
    assert asked == [(turned.stride(), (True, here.scale, 0, None))]
    assert all(x.grad.eq(7).all() for x in (here.q, here.k, here.v))
    assert len(here.driver.launches) == 1
    # An expanded gradient, what .sum().backward() sends, is copied and then known.
    here.q.grad = None
    flash_attention(here.q, here.k, here.v, is_causal=True).sum().backward()
    assert here.q.grad.eq(VALUES["dq"]).all() and len(asked) == 1


def test_second_derivative_is_refused(both):
    here = both()
    here.offer()
    o = flash_attention(here.q, here.k, here.v, is_causal=True)
    (dq,) = torch.autograd.grad(o, here.q, here.do.clone().requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_driver_errors(both):
    here = both()
    here.offer()
    q, k, v = (x.detach() for x in (here.q, here.k, here.v))
    here.driver.statuses = [700]
    with pytest.raises(RuntimeError, match="700"):
        flash_attention(q, k, v, is_causal=True)
    assert here.driver.contexts == []
    here.driver.statuses = [201]  # a thread without a context gets the plan's and tries once more
    assert flash_attention(q, k, v, is_causal=True).eq(VALUES["o"]).all()
    assert here.driver.contexts == [4321]


def test_what_cannot_be_launched_so_stays_in_python(both, monkeypatch):
    """A descriptor that the driver's function does not move as Triton makes it, and a kernel with
    scratch memory.
    """
    here = both()
    monkeypatch.setattr(extension, "descriptor_bytes", lambda each: bytes(each[8:] + each[:8]))
    kernels._offer_forward(here.case, here.forward, here.q, here.k, here.v, 1, 1)
    assert "another address" in extension.NATIVE.problem
    assert extension.NATIVE.call(here.q, here.k, here.v, True, None) is None
    monkeypatch.setattr(extension, "descriptor_bytes", bytes)
    here.dq.main.binary.metadata.global_scratch_size = 64
    with pytest.raises(ValueError, match="plain launch"):
        extension.step_of(here.dq.main, ((0, 0),) * 8, here.moved, 4096)


def test_which_cases_are_offered():
    case = launching.LaunchKey(
        0,
        BF16,
        *[launching.View((1, 1, 16, 16), (256, 256, 16, 1), 0)] * 3,
        True,
        0.25,
        "ieee",
        (),
        None,
    )
    assert extension.takes(case)
    assert extension.takes(case._replace(dtype=torch.float32, precision="tf32"))
    assert not extension.takes(case._replace(num_splits=2))
    assert not extension.takes(case._replace(device=None))
    assert not extension.takes(case._replace(q=case.q._replace(offset=2)))
