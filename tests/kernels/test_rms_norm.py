"""RMSNorm: the oracle against the equation, the kernels against the oracle, the house's promises.

Without a GPU the kernels run in Triton's interpreter (in a process of its own, since the choice is
made when Triton is imported) and are compiled ahead of time for three architectures. The tests
marked gpu cover every type against float64.
"""

import ctypes
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from tests.kernels.driver_here import Driver, addresses, needs_compiler  # noqa: E402
from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
    run_interpreted,
)

from stepgauge.kernels import rms_norm as package  # noqa: E402
from stepgauge.kernels.rms_norm import (  # noqa: E402
    RMSNormReference,
    RMSNormTriton,
    TritonRMSNorm,
    backward_input,
    backward_weight,
    extension,
    reference,
    rms_norm,
)
from stepgauge.runtime.extension import Extension  # noqa: E402

try:
    import triton
except ImportError:
    triton = None

gpu = pytest.mark.gpu

# Relative error (norms) against float64 that one rounding to the type leaves, with room.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def error(value, exact):
    """‖value - exact‖ / ‖exact‖; NaN anywhere gives NaN, which no comparison lets pass."""
    exact = exact.double()
    return ((value.double().to(exact.device) - exact).norm() / exact.norm()).item()


def exact_results(x, weight, dy, dsum=None, residual=None):
    """Output and gradients in float64 on the CPU, by autograd of the equation."""
    h = x.detach().double().cpu()
    if residual is not None:
        # The kernel normalises the sum as it is stored.
        h = (x.detach() + residual.detach()).double().cpu()
    h.requires_grad_()
    w = weight.detach().double().cpu().requires_grad_()
    y = w * h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-5)
    total = (y * dy.double().cpu()).sum()
    if dsum is not None:
        total = total + (h * dsum.double().cpu()).sum()
    total.backward()
    return y.detach(), h.grad, w.grad


def inputs(shape, dtype, *, weight_dtype=None, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) * 2 + 0.5).to(device, dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator).to(device, weight_dtype or dtype)
    dy = torch.randn(shape, generator=generator).to(device, dtype)
    return x, weight.requires_grad_(), dy


def check_all(x, weight, dy, function=RMSNormTriton.apply):
    y = function(x, weight)
    y.backward(dy)
    exact_y, exact_dx, exact_dw = exact_results(x, weight, dy)
    assert y.dtype == x.dtype and x.grad.dtype == x.dtype and weight.grad.dtype == weight.dtype
    assert error(y, exact_y) < TOLERANCE[y.dtype]
    assert error(x.grad, exact_dx) < TOLERANCE[x.dtype]
    assert error(weight.grad, exact_dw) < TOLERANCE[weight.dtype]


# The oracle


def test_gradients_written_out_equal_autograd():
    x, weight, dy = inputs((3, 5, 24), torch.float64)
    _, exact_dx, exact_dw = exact_results(x, weight, dy)
    assert error(backward_input(dy, x, weight), exact_dx) < 1e-13
    assert error(backward_weight(dy, x, weight), exact_dw) < 1e-13


def test_reference_function_passes_gradcheck():
    x, weight, _ = inputs((2, 3, 7), torch.float64)
    assert torch.autograd.gradcheck(RMSNormReference.apply, (x, weight))


def test_reference_equals_the_builtin():
    x, weight, _ = inputs((4, 33), torch.float32)
    builtin = F.rms_norm(x, (33,), weight, 1e-5)
    assert error(RMSNormReference.apply(x, weight), builtin) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (0, 4), (2, 3, 17)])
def test_public_function_on_the_cpu(dtype, shape):
    x, weight, dy = inputs(shape, dtype)
    y = rms_norm(x, weight)
    assert y.shape == x.shape and y.dtype == dtype
    y.backward(dy)
    if x.numel():
        _, exact_dx, exact_dw = exact_results(x, weight, dy)
        assert error(x.grad, exact_dx) < TOLERANCE[dtype]
        assert error(weight.grad, exact_dw) < TOLERANCE[dtype]
    else:
        assert weight.grad.abs().sum() == 0


def test_residual_returns_the_sum_and_both_gradients():
    x, weight, dy = inputs((4, 12), torch.float32)
    residual = inputs((4, 12), torch.float32, seed=1)[0]
    y, total = rms_norm(x, weight, residual=residual)
    assert torch.equal(total, x + residual)
    (y * dy + total).sum().backward()
    _, exact_dh, exact_dw = exact_results(x, weight, dy, torch.ones_like(dy), residual)
    for gradient in (x.grad, residual.grad):
        assert error(gradient, exact_dh) < 1e-6
    assert error(weight.grad, exact_dw) < 1e-6


def test_module_exchanges_state_with_the_builtin():
    theirs = torch.nn.RMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    ours = TritonRMSNorm(16)
    assert torch.equal(ours.weight, torch.ones(16))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    assert error(ours(x), theirs(x)) < 1e-6
    assert list(ours.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    "x_shape, weight_shape", [((2, 3), (4,)), ((2, 3), (3, 1)), ((), (1,)), ((2, 0), (0,))]
)
def test_shapes_that_do_not_fit_are_named(x_shape, weight_shape):
    with pytest.raises(ValueError, match=re.escape(str(weight_shape))):
        rms_norm(torch.ones(x_shape), torch.ones(weight_shape))


def test_residual_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="residual"):
        rms_norm(torch.ones(2, 3), torch.ones(3), residual=torch.ones(3))


def test_imports_and_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from stepgauge.kernels.rms_norm import rms_norm, RMSNormTriton, ops\n"
        "assert ops is None\n"
        "assert rms_norm(torch.ones(2, 4), torch.ones(4)).shape == (2, 4)\n"
        "try:\n    RMSNormTriton.apply(torch.ones(2, 4), torch.ones(4))\n"
        "except ValueError as e:\n    assert 'triton' in str(e)\n"
        "else:\n    raise SystemExit('no ValueError')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The kernels in the interpreter


@needs_triton
@compiled_only
def test_kernels_in_the_interpreter():
    run_interpreted(__file__, least=20)


@needs_triton
@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 100), (1, 2), (5, 2560)])
def test_interp_kernels_equal_float64(shape, dtype, interpreter, poisoned):
    check_all(*inputs(shape, dtype))


@needs_triton
@interpreted_only
@pytest.mark.parametrize("width", [20000, 40000])
def test_interp_wide_rows(width, interpreter, poisoned):
    check_all(*inputs((2, width), torch.float16))


@needs_triton
@interpreted_only
def test_interp_weight_in_float32(interpreter, poisoned):
    check_all(*inputs((5, 48), torch.float16, weight_dtype=torch.float32))


@needs_triton
@interpreted_only
def test_interp_non_contiguous(interpreter, poisoned):
    wide, _, _ = inputs((6, 4, 20), torch.float32)
    x = wide.detach().transpose(0, 1)[:, ::2, 1:18].requires_grad_()
    weight = torch.randn(34)[::2].requires_grad_()
    dy = torch.randn(1, 3, 17).expand(4, 3, 17)
    check_all(x, weight, dy)


@needs_triton
@interpreted_only
def test_interp_no_rows(interpreter):
    x, weight, dy = inputs((0, 8), torch.float32)
    RMSNormTriton.apply(x, weight).backward(dy)
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros(8))


@needs_triton
@interpreted_only
@pytest.mark.parametrize("width", [24, 33000])
def test_interp_residual(width, interpreter, poisoned):
    x, weight, dy = inputs((3, width), torch.float16)
    residual, _, dsum = inputs((3, width), torch.float16, seed=1)
    y, total = package._RMSNormResidual.apply(x, residual, weight, 1e-5, x.dtype)
    torch.autograd.backward([y, total], [dy, dsum])
    exact_y, exact_dh, exact_dw = exact_results(x, weight, dy, dsum, residual)
    assert torch.equal(total, x + residual)
    assert error(y, exact_y) < 1e-3 and error(weight.grad, exact_dw) < 1e-3
    for gradient in (x.grad, residual.grad):
        assert error(gradient, exact_dh) < 1e-3


@needs_triton
@interpreted_only
def test_interp_output_type_of_autocast(interpreter, poisoned):
    x, weight, _ = inputs((3, 40), torch.float16)
    y = RMSNormTriton.apply(x, weight, 1e-5, torch.float32)
    assert y.dtype == torch.float32
    y.backward(torch.ones_like(y))
    exact_y, exact_dx, _ = exact_results(x, weight, torch.ones(3, 40))
    assert error(y, exact_y) < 1e-6 and error(x.grad, exact_dx) < 1e-3


@needs_triton
@interpreted_only
@pytest.mark.parametrize(
    "rows, fold, blocks", [(4, True, 0), (4, False, 0), (1, True, 0), (1, True, 2)]
)
def test_interp_every_backward_shape(rows, fold, blocks, interpreter, poisoned, monkeypatch):
    """The launch shapes that the tuned tables may choose all give the same gradients."""
    from stepgauge.kernels.rms_norm import ops
    from stepgauge.kernels.rms_norm.triton import BackwardConfig

    config = BackwardConfig(
        block=16 if blocks else 64, rows=rows, num_warps=4, keep_weight=rows > 1, blocks=blocks
    )
    monkeypatch.setattr(BackwardConfig, "fold", lambda self, itemsize: fold)
    plan = ops.NormLaunches(50, torch.float32, 2, backward=config)
    monkeypatch.setattr(ops, "plan_for", lambda *args: plan)
    check_all(*inputs((11, 50), torch.float32))


# What surrounds the kernels


@needs_triton
@compiled_only
def test_one_graph_under_torch_compile(hopper_driver):
    """Dynamo and AOTAutograd take the operators whole, down to the kernels, both directions."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    def block(x, weight, residual):
        y, total, _ = torch.ops.stepgauge.rms_norm_residual(x, residual, weight, 1e-5, x.dtype)
        return y + RMSNormTriton.apply(total, weight)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    with FakeTensorMode():
        x, residual = (torch.empty(8, 64, requires_grad=True) for _ in range(2))
        weight = torch.empty(64, requires_grad=True)
        torch.compile(block, backend=backend, fullgraph=True)(x, weight, residual).sum().backward()
    counts = [sum("triton_kernel" in str(n.target) for n in g.graph.nodes) for g in graphs]
    # Forward: two norms. Backward: each has its pass and its reduction.
    assert counts == [2, 4]


@needs_triton
@compiled_only
@pytest.mark.parametrize(("width", "operators"), [(2560, 0), (16384, 1)])
def test_under_torch_compile_inductor_gets_the_equation_up_to_its_width(
    hopper_driver, width, operators
):
    """On a fake CUDA tensor: narrow rows reach the compiler as plain operations, wide ones as the
    kernel's operator.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    with FakeTensorMode():
        x, weight = torch.empty(4, width, device="cuda"), torch.empty(width, device="cuda")
        torch.compile(rms_norm, backend=keep, fullgraph=True)(x, weight)
    calls = [str(node.target) for node in graphs[0].graph.nodes if "rms_norm" in str(node.target)]
    assert len(calls) == operators


@needs_triton
@compiled_only
def test_fake_tensors_and_flop_counter():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x = torch.empty(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(64, requires_grad=True)
        y = RMSNormTriton.apply(x, weight)
        assert y.shape == x.shape and y.dtype == x.dtype
        (y.float() @ torch.empty(64, 3)).sum().backward()
        assert x.grad.shape == x.shape and weight.grad.dtype == torch.float32
    # Forward and the input's gradient of the matrix product; the norm adds none, as the built-in.
    assert counter.get_total_flops() == 2 * (2 * 10 * 64 * 3)
    assert any("stepgauge.rms_norm" in str(op) for op in counter.get_flop_counts()["Global"])


@needs_triton
@compiled_only
def test_operators_pass_torchs_own_schema_check():
    for op in ("rms_norm", "rms_norm_residual", "rms_norm_backward"):
        schema = getattr(torch.ops.stepgauge, op).default._schema
        assert not schema.is_mutable
        assert all(r.alias_info is None for r in schema.returns)


@needs_triton
@compiled_only
def test_cpu_tensor_is_refused_by_the_kernels_only():
    x, weight, _ = inputs((2, 8), torch.float32)
    with pytest.raises(ValueError, match="CUDA"):
        RMSNormTriton.apply(x, weight)
    assert rms_norm(x, weight).shape == x.shape


@needs_triton
def test_kernels_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="float64"):
        RMSNormTriton.apply(torch.ones(2, 8).double(), torch.ones(8).double())
    with pytest.raises(ValueError, match="65537"):
        RMSNormTriton.apply(torch.ones(1, 65537), torch.ones(65537))


def specialisations():
    """Widths and types that between them use every launch shape the tables can choose."""
    for dtype in ("fp32", "bf16", "fp16"):
        for width in (64, 1000, 2560, 4096, 8192, 12288, 16384, 20001, 32768, 65536):
            if dtype != "fp16" or width == 2560:
                yield width, dtype


@needs_triton
@compiled_only
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_without_spills(arch):
    torch_types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    from stepgauge.kernels.rms_norm import ops

    reduced = set()
    for width, dtype in specialisations():
        if arch != 90 and width not in (2560, 16384, 65536):
            continue  # One of each kernel is enough to prove that it builds.
        # sm_80's compiler spills six to eight registers in the widest float32 row.
        allowed = 32 if arch == 80 and width == 65536 else 0
        if not triton.__version__.startswith("3.6."):
            allowed = 64  # Tuned for 3.6; 3.9 spills up to 56 bytes in float32 rows from 16,384 on.
        plan = ops.NormLaunches(width, torch_types[dtype], 132)
        row = {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "eps": "fp32"}
        for launch in (plan.forward, plan.backward, plan.reduce):
            if launch is plan.reduce:
                if width in reduced:
                    continue
                reduced.add(width)
            resources = resources_ahead(launch, row, dtype, arch)
            assert resources["stack"] <= allowed, (launch.kernel.__name__, width, dtype, resources)


@needs_triton
def test_tiles_in_flight_fit_shared_memory():
    from stepgauge.kernels.rms_norm.triton import backward_config

    config = backward_config(16384, 4)
    # Three tensors of 64 KiB fit an H100's 227 KiB once, an A100's 163 KiB not at all.
    assert config.fitted(4, has_dsum=False, shared_bytes=227 * 1024).stages == 2
    assert config.fitted(4, has_dsum=True, shared_bytes=227 * 1024).stages == 1
    assert config.fitted(4, has_dsum=False, shared_bytes=163 * 1024).stages == 1


def resources_ahead(launch, known, dtype, arch):
    """Registers and stack of a launch, compiled as the JIT would."""
    unused = {"residual_ptr", "sum_ptr", "dsum_ptr"}
    names = [
        name
        for name in launch.kernel.arg_names
        if name not in launch.constants and name not in unused
    ]
    signature = {
        name: "i32" if name.startswith("num_") else known.get(name, "*" + dtype) for name in names
    }
    aligned = [name for name in names if signature[name].startswith("*")]
    return resources_of(
        compile_ahead(
            launch.kernel,
            arch,
            signature,
            launch.constants,
            aligned=aligned,
            options=launch.options,
        )
    )


# The C++ path: built here, with a Python function in the place of cuLaunchKernel


class FakeDriver(Driver):
    """cuLaunchKernel for CPU tensors of one width in float32: does the kernels' work on the
    addresses.
    """

    def __init__(self, module, width, num_programs):
        super().__init__()
        self.module, self.width, self.num_programs = module, width, num_programs
        module.configure(*addresses(self.functions), False)

    def register(self, x, weight, *, residual=False, with_backward=True):
        reduce_grid = -(-self.width // 32)
        backward = ((21 + residual, 256, 512), 1, self.num_programs, 1, (31, 128, 64), reduce_grid)
        forward = (11 + residual, 128, 0, 2)
        self.module.register(
            x, weight, x, residual, 4321, forward, backward if with_backward else None
        )

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        status = self.statuses.pop(0) if self.statuses else 0
        if status:
            return status
        self.launches.append((function, (gx, gy, gz), (bx, by, bz), shared, stream))
        kernel = {
            11: self.forward,
            12: self.forward_residual,
            21: self.backward,
            22: self.backward_residual,
        }
        kernel.get(function, self.reduce)(gx, parameters)
        return 0

    def rows(self, parameters, i, num_rows, width=None):
        """The tensor whose address is parameter i."""
        width = width or self.width
        address = ctypes.c_size_t.from_address(parameters[i]).value
        return torch.frombuffer(
            (ctypes.c_float * (num_rows * width)).from_address(address), dtype=torch.float32
        ).view(num_rows, width)

    def forward(self, grid, p, num_tensors=4):
        num_rows = ctypes.c_int32.from_address(p[num_tensors]).value
        eps = ctypes.c_float.from_address(p[num_tensors + 1]).value
        assert grid == -(-num_rows // 2)
        h = self.rows(p, 0, num_rows)
        if num_tensors == 6:
            h = self.rows(p, 4, num_rows).copy_(h + self.rows(p, 1, num_rows))
        weight, y = self.rows(p, num_tensors // 2 - 1, 1), self.rows(p, num_tensors // 2, num_rows)
        rstd = torch.rsqrt(h.square().mean(1, keepdim=True) + eps)
        y.copy_(h * rstd * weight)
        self.rows(p, num_tensors - 1, num_rows, 1).copy_(rstd)

    def forward_residual(self, grid, p):
        self.forward(grid, p, num_tensors=6)

    def backward(self, grid, p, has_dsum=False):
        num_rows = ctypes.c_int32.from_address(p[6 + has_dsum]).value
        dy, h = self.rows(p, 0, num_rows), self.rows(p, 1, num_rows)
        weight, rstd = self.rows(p, 2, 1), self.rows(p, 3, num_rows, 1)
        hhat, g = h * rstd, dy * weight
        dx = (g - hhat * (g * hhat).mean(1, keepdim=True)) * rstd
        if has_dsum:
            dx += self.rows(p, 4, num_rows)
        self.rows(p, 4 + has_dsum, num_rows).copy_(dx)
        partial = self.rows(p, 5 + has_dsum, grid)
        for program in range(grid):
            partial[program] = (dy * hhat)[program::grid].sum(0)

    def backward_residual(self, grid, p):
        self.backward(grid, p, has_dsum=True)

    def reduce(self, grid, p):
        num_programs = ctypes.c_int32.from_address(p[2]).value
        self.rows(p, 1, 1).copy_(self.rows(p, 0, num_programs).sum(0, keepdim=True))


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    # A copy has plans and addresses of its own: those that GPU tests use stay as they are.
    return extension.NATIVE.imported(
        shutil.copy(extension.NATIVE.build(), tmp_path_factory.mktemp("cpp"))
    )


@needs_compiler
@compiled_only
def test_cpp_result_gradients_and_launches(cpp):
    driver = FakeDriver(cpp, 48, num_programs=4)
    x, weight, dy = inputs((3, 3, 48), torch.float32)
    driver.register(x, weight)
    y = cpp.rms_norm(x, weight, 1e-5, None)
    assert y.shape == x.shape and y.requires_grad
    # An expanded gradient: what .sum().backward() sends.
    (y * dy).sum().backward()
    exact_y, exact_dx, exact_dw = exact_results(x, weight, dy)
    assert (
        error(y, exact_y) < 1e-6
        and error(x.grad, exact_dx) < 1e-6
        and error(weight.grad, exact_dw) < 1e-6
    )
    assert driver.launches == [
        (11, (5, 1, 1), (128, 1, 1), 0, 1234),
        (21, (4, 1, 1), (256, 1, 1), 512, 1234),
        (31, (2, 1, 1), (128, 1, 1), 64, 1234),
    ]
    y = cpp.rms_norm(x, weight, 1e-5, None)
    dx, dw = torch.autograd.grad(y, (x, weight), torch.ones(()).expand(y.shape))
    _, exact_dx, exact_dw = exact_results(x, weight, torch.ones(y.shape))
    assert error(dx, exact_dx) < 1e-6 and error(dw, exact_dw) < 1e-6
    with torch.no_grad():
        assert not cpp.rms_norm(x, weight, 1e-5, None).requires_grad


@needs_compiler
@compiled_only
@pytest.mark.parametrize("used", ["both", "y", "sum"])
def test_cpp_residual(cpp, used):
    driver = FakeDriver(cpp, 40, num_programs=2)
    x, weight, dy = inputs((7, 40), torch.float32)
    residual, _, dsum = inputs((7, 40), torch.float32, seed=1)
    driver.register(x, weight, residual=True)
    y, total = cpp.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    dy, dsum = (t * (used in ("both", n)) for t, n in ((dy, "y"), (dsum, "sum")))
    outputs = {"both": (y, total), "y": (y,), "sum": (total,)}[used]
    gradients = {"both": (dy, dsum), "y": (dy,), "sum": (dsum,)}[used]
    torch.autograd.backward(outputs, gradients)
    exact_y, exact_dh, exact_dw = exact_results(x, weight, dy, dsum, residual)
    assert error(y, exact_y) < 1e-6
    assert error(x.grad, exact_dh) < 1e-6 and torch.equal(x.grad, residual.grad)
    assert (weight.grad.double() - exact_dw).norm() <= 1e-6 * exact_dw.norm()


@needs_compiler
@compiled_only
def test_cpp_leaves_the_rest_to_python(cpp):
    from torch.utils.flop_counter import FlopCounterMode

    driver = FakeDriver(cpp, 32, num_programs=2)
    x, weight, _ = inputs((6, 32), torch.float32)
    driver.register(x, weight, with_backward=False)
    plain = x.detach(), weight.detach()
    assert cpp.rms_norm(*plain, 1e-5, None) is not None
    assert cpp.rms_norm(x, weight, 1e-5, None) is None  # No backward yet.

    class Subclass(torch.Tensor):
        pass

    declined = {
        "unaligned": torch.randn(6 * 32 + 1)[1:].view(6, 32),
        "strided": torch.randn(32, 6).t(),
        "another type": plain[0].half(),
        "no rows": torch.empty(0, 32),
        "another width": torch.randn(6, 33),
        "subclass": plain[0].as_subclass(Subclass),
        "scalar": torch.tensor(1.0),
    }
    for name, tensor in declined.items():
        assert cpp.rms_norm(tensor, plain[1], 1e-5, None) is None, name
    assert cpp.rms_norm(*plain, 1e-5, torch.randn(6, 16)) is None
    with FlopCounterMode(display=False):
        assert cpp.rms_norm(*plain, 1e-5, None) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(cpp.rms_norm(row, plain[1], 1e-5, None)) or row)(
        plain[0]
    )
    assert seen == [None]
    assert len(driver.launches) == 1


@needs_compiler
@compiled_only
def test_cpp_driver_errors(cpp):
    driver = FakeDriver(cpp, 24, num_programs=2)
    x, weight, _ = (t.detach() for t in inputs((4, 24), torch.float32))
    driver.register(x, weight)
    driver.statuses = [700]
    with pytest.raises(RuntimeError, match="700"):
        cpp.rms_norm(x, weight, 1e-5, None)
    assert driver.contexts == []
    # A thread without a context gets the plan's and tries once more.
    driver.statuses = [201]
    assert (
        error(cpp.rms_norm(x, weight, 1e-5, None), reference.forward(x.double(), weight.double()))
        < 1e-6
    )
    assert driver.contexts == [4321]


@compiled_only
@pytest.mark.parametrize(
    "setting, said", [({"STEPGAUGE_EXTENSION": "0"}, "=0"), ({"CXX": "false"}, "false")]
)
def test_without_the_extension_nothing_changes(setting, said, monkeypatch, tmp_path):
    ours = extension.NATIVE
    native = Extension(ours.name, ours.source, ours.configure, headers=ours.headers)
    monkeypatch.setattr(extension, "NATIVE", native)
    for name, value in {**setting, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert native.load() is False and said in native.problem and native.call is None
    assert list(tmp_path.rglob("*.so")) == []
    x, weight, _ = inputs((2, 8), torch.float32)
    assert rms_norm(x, weight).shape == x.shape


# On a GPU


@pytest.fixture
def in_cpp(monkeypatch):
    """The extension, loaded; its list says of each call whether C++ took it."""
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("needs a C++ compiler")
    assert extension.NATIVE.load(), extension.NATIVE.problem
    call, taken = extension.NATIVE.call, []

    def counted(*args):
        result = call(*args)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(extension.NATIVE, "call", counted)
    return taken


@pytest.fixture
def filled_with_nan():
    """As `poisoned`, for memory that C++ allocates too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [2560, 32768])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [
        (torch.float32,) * 2,
        (torch.float16,) * 2,
        (torch.bfloat16,) * 2,
        (torch.bfloat16, torch.float32),
    ],
)
def test_gpu_cpp_is_python_to_the_bit(
    dtype, weight_dtype, with_residual, width, in_cpp, filled_with_nan, monkeypatch
):
    x, weight, dy = inputs((3, 67, width), dtype, weight_dtype=weight_dtype, device="cuda")
    residual, _, dsum = inputs((3, 67, width), dtype, device="cuda", seed=1)

    def run():
        if not with_residual:
            y = rms_norm(x, weight)
            return (y, *torch.autograd.grad(y, (x, weight), dy))
        outputs = rms_norm(x, weight, residual=residual)
        return (*outputs, *torch.autograd.grad(outputs, (x, residual, weight), (dy, dsum)))

    with monkeypatch.context() as patch:
        patch.setattr(extension.NATIVE, "call", None)
        expected = run()
    run()  # C++ learns of the backward at the first forward after it.
    in_cpp.clear()
    for _ in range(3):
        for ours, theirs in zip(run(), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert in_cpp == [True] * 3


@gpu
@needs_gpu
def test_gpu_cpp_refuses_a_second_derivative(in_cpp):
    x, weight, dy = inputs((16, 256), torch.float32, device="cuda")
    for _ in range(3):
        torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    assert in_cpp[-1]
    (dx,) = torch.autograd.grad(rms_norm(x, weight), x, dy, create_graph=True)
    assert error(dx, exact_results(x, weight, dy)[1]) < 1e-6
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dx.sum(), x)


@gpu
@needs_gpu
def test_gpu_cpp_on_a_side_stream(in_cpp):
    """The launch goes to the current stream: it waits for what that stream does before it."""
    x, weight, _ = inputs((2048, 2560), torch.bfloat16, device="cuda")
    x, weight = x.detach(), weight.detach()
    expected = rms_norm(x, weight)
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        y = rms_norm(late, weight)
    stream.synchronize()
    assert in_cpp[-1] and torch.equal(y, expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (3, 7),
        (2, 5, 1000),
        (2048, 2560),
        (777, 4096),
        (300, 8192),
        (301, 16384),
        (135, 20001),
        (40, 32768),
        (9, 65536),
    ],
)
def test_gpu_against_float64(shape, dtype, poisoned):
    if shape == (1, 1):
        # The gradient of a one-wide row is eps's alone, a difference of equals: y is what counts.
        x, weight, _ = inputs(shape, dtype, device="cuda")
        assert error(rms_norm(x, weight), exact_results(x, weight, x.detach())[0]) < 1e-2
        return
    check_all(*inputs(shape, dtype, device="cuda"), function=rms_norm)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_weight_in_float32(dtype, poisoned):
    check_all(*inputs((99, 2560), dtype, weight_dtype=torch.float32, device="cuda"))


@gpu
@needs_gpu
def test_gpu_unaligned_and_non_contiguous(poisoned):
    storage = torch.randn(64 * 128 + 1, device="cuda", dtype=torch.bfloat16)
    x = storage[1:].view(64, 128).requires_grad_()
    _, weight, dy = inputs((64, 128), torch.bfloat16, device="cuda")
    check_all(x, weight, dy)
    wide = torch.randn(30, 20, 256, device="cuda")
    x = wide.transpose(0, 1)[:, ::2, 1:130].requires_grad_()
    weight = torch.randn(129, device="cuda", requires_grad=True)
    check_all(x, weight, torch.randn(1, 15, 129, device="cuda").expand(20, 15, 129))


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2560, 32768])
def test_gpu_residual(dtype, width, poisoned):
    x, weight, dy = inputs((50, width), dtype, device="cuda")
    residual, _, dsum = inputs((50, width), dtype, device="cuda", seed=1)
    y, total = rms_norm(x, weight, residual=residual)
    torch.autograd.backward([y, total], [dy, dsum])
    exact_y, exact_dh, exact_dw = exact_results(x, weight, dy, dsum, residual)
    assert torch.equal(total, x + residual)
    assert error(y, exact_y) < TOLERANCE[dtype]
    assert error(weight.grad, exact_dw) < TOLERANCE[dtype]
    for gradient in (x.grad, residual.grad):
        assert error(gradient, exact_dh) < TOLERANCE[dtype]


@gpu
@needs_gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_autocast_types_are_the_builtins(dtype, weight_dtype):
    # What is promised is the installed torch's type: rms_norm came to autocast's list of float32
    # operations with 2.12; 2.11 gives x's type. The rounding is each one's own, so both are
    # compared with float64 and not with each other.
    x, weight, _ = inputs((4, 64), dtype, weight_dtype=weight_dtype, device="cuda")
    for _ in range(3):  # In Python, then, if it is there, in C++.
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ours, theirs = rms_norm(x, weight), F.rms_norm(x, (64,), weight, 1e-5)
        assert ours.dtype == theirs.dtype
        assert error(ours, exact_results(x, weight, x)[0]) < TOLERANCE[ours.dtype]
        ours.sum().backward()


@gpu
@needs_gpu
def test_gpu_gradient_is_the_same_every_time():
    x, weight, dy = inputs((5000, 2560), torch.bfloat16, device="cuda")
    runs = [torch.autograd.grad(rms_norm(x, weight), (x, weight), dy) for _ in range(5)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@gpu
@needs_gpu
def test_gpu_compiled_equals_eager():
    def block(x, weight, residual):
        y, total = rms_norm(x, weight, residual=residual)
        return rms_norm(y * 2, weight) + total

    torch._dynamo.reset()
    tensors = [*inputs((64, 2560), torch.bfloat16, device="cuda")[:2]]
    tensors.append(inputs((64, 2560), torch.bfloat16, device="cuda", seed=1)[0])
    eager = block(*tensors)
    compiled = torch.compile(block, fullgraph=True)(*tensors)
    dy = torch.randn_like(eager)
    for a, b in zip(
        torch.autograd.grad(eager, tensors, dy), torch.autograd.grad(compiled, tensors, dy),
        strict=True,
    ):  # fmt: skip
        assert error(a, b) < 1e-2
    assert error(compiled, eager) < 1e-2


@gpu
@needs_gpu
@pytest.mark.parametrize("way", ["in Python", "in C++"])
def test_gpu_captured_in_a_graph_and_no_synchronisation(way, request, monkeypatch):
    taken = request.getfixturevalue("in_cpp") if way == "in C++" else None
    if taken is None:
        monkeypatch.setattr(extension.NATIVE, "call", None)
    x, weight, dy = inputs((512, 1024), torch.bfloat16, device="cuda")
    for _ in range(3):
        torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    assert taken is None or taken[-2:] == [True, True]


@gpu
@needs_gpu
def test_gpu_beyond_2_31_elements():
    """The last rows of a tensor of 2.2e9 elements: offsets are int64."""
    rows, width = 140_000, 16384
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    dy = torch.empty_like(x).normal_()
    from stepgauge.kernels.rms_norm import ops

    y, _, rstd = ops.run_forward(x, None, weight, 1e-5, x.dtype)
    last = slice(rows - 4, rows)
    exact = reference.forward(x[last].double(), weight.double())
    assert error(y[last], exact) < TOLERANCE[torch.bfloat16]
    del y
    dx, _ = ops.run_backward(dy, x, weight, rstd, None)
    exact = backward_input(dy[last].double(), x[last].double(), weight.double())
    assert error(dx[last], exact) < TOLERANCE[torch.bfloat16]
    assert not dx[:: rows // 100].isnan().any()


@gpu
@needs_gpu
def test_gpu_training_equals_the_builtin():
    """Plain SGD, so that a wrong scale of a gradient cannot hide; float64 is the judge."""
    torch.manual_seed(0)
    data = torch.randn(20, 32, 256, device="cuda")

    def train(norm, dtype):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), norm, torch.nn.Linear(256, 8))
        model.to("cuda", dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x in data.to(dtype):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    exact = train(torch.nn.RMSNorm(256, eps=1e-5), torch.float64)
    ours = train(TritonRMSNorm(256), torch.float32)
    assert error(ours, exact) < 1e-5
