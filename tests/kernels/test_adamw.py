"""FusedAdamW: compares arithmetic, state and behaviour with torch's AdamW, and the kernel with the
oracle.

Without a GPU the kernel runs in Triton's interpreter, in a separate process, and is compiled ahead
of time for three architectures. The tests marked gpu need a CUDA GPU.
"""

import copy
import gc
import re
import weakref

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.triton_here import (  # noqa: E402
    compile_ahead,
    compiled_only,
    interpreted_only,
    needs_gpu,
    needs_triton,
    resources_of,
)

from stepgauge.kernels import adamw as package  # noqa: E402
from stepgauge.kernels.adamw import FusedAdamW  # noqa: E402

gpu = pytest.mark.gpu

SHAPES = [(5, 7), (130,), (), (3, 1, 4), (64, 3)]
HYPER = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def error(value, exact):
    exact = exact.detach().double().cpu()
    return ((value.detach().double().cpu() - exact).norm() / exact.norm()).item()


def parameters(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    # copy=True, because otherwise the compared copies could share memory.
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype, copy=True))
        for shape in shapes
    ]


def set_gradients(seed, *groups, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for tensors in zip(*groups, strict=True):
        gradient = torch.randn(tensors[0].shape, generator=generator)
        # Round to the narrowest type, so that every group gets the same values.
        gradient = gradient.to(min((t.dtype for t in tensors), key=lambda d: d.itemsize))
        for tensor in tensors:
            tensor.grad = (gradient * scale).to(tensor.device, tensor.dtype, copy=True)


def train(num_steps, pairs, first_seed=0):
    for seed in range(first_seed, first_seed + num_steps):
        set_gradients(seed, *(group for group, _ in pairs))
        for _, optimizer in pairs:
            optimizer.step()


@pytest.mark.parametrize("maximize, steps", [(False, 1000), (True, 10)])
def test_equals_torch_over_many_steps(maximize, steps):
    few = SHAPES[:2]
    fused_params, torch_params = parameters(shapes=few), parameters(shapes=few)
    exact = parameters(torch.float64, shapes=few)
    pairs = [
        (fused_params, FusedAdamW(fused_params, **HYPER, maximize=maximize)),
        (torch_params, torch.optim.AdamW(torch_params, **HYPER, maximize=maximize)),
        (exact, torch.optim.AdamW(exact, **HYPER, maximize=maximize)),
    ]
    train(steps, pairs)
    for a, b, c in zip(fused_params, torch_params, exact, strict=True):
        # torch's rounding of 1 - lr * weight_decay drifts, so allow an error up to torch's.
        assert error(a, c) < 1e-5
        assert error(a, c) <= error(b, c)
        assert error(a, b) < 1e-4


def test_groups_have_their_own_settings_and_schedulers():
    fused_params, torch_params = parameters(), parameters()

    def make(cls, params):
        optimizer = cls(
            [{"params": params[:2], "lr": 1e-3, "weight_decay": 0.0}, {"params": params[2:]}],
            lr=3e-2,
        )
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    (a, a_schedule), (b, b_schedule) = (
        make(FusedAdamW, fused_params),
        make(torch.optim.AdamW, torch_params),
    )
    for seed in range(4):
        train(1, [(fused_params, a), (torch_params, b)], seed)
        a_schedule.step()
        b_schedule.step()
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_state_dicts_can_be_exchanged_with_torch(fused):
    fused_params, torch_params, stay = parameters(), parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER, fused=fused)
    reference = torch.optim.AdamW(stay, **HYPER)
    train(3, [(fused_params, a), (torch_params, b), (stay, reference)])
    saved_a, saved_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
    assert set(saved_a["state"][0]) == set(saved_b["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved_a["state"][0]["step"].dtype == saved_b["state"][0]["step"].dtype
    assert saved_a["param_groups"][0].keys() == saved_b["param_groups"][0].keys()
    a, b = FusedAdamW(fused_params), torch.optim.AdamW(torch_params)
    a.load_state_dict(saved_b)
    b.load_state_dict(saved_a)
    assert a.param_groups[0]["lr"] == HYPER["lr"]
    train(3, [(fused_params, a), (torch_params, b), (stay, reference)], 3)
    for p, q, r in zip(fused_params, torch_params, stay, strict=True):
        assert error(p, r) < 1e-6 and error(q, r) < 1e-6
    assert a.state[fused_params[0]]["step"].item() == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_keep_float32_moments_through_a_checkpoint(dtype):
    fused_params = parameters(dtype)
    a = FusedAdamW(fused_params, **HYPER)
    train(2, [(fused_params, a)])
    saved = copy.deepcopy(a.state_dict())
    assert saved["state"][1]["exp_avg"].dtype == torch.float32
    again = FusedAdamW(fused_params)
    again.load_state_dict(saved)
    for i, p in enumerate(fused_params):
        for name in ("exp_avg", "exp_avg_sq"):
            assert again.state[p][name].dtype == torch.float32
            assert torch.equal(again.state[p][name], saved["state"][i][name])


def test_narrow_parameters_follow_the_equation():
    """One step from the parameter's rounded value, in float64, rounded once to the type."""
    fused_params = parameters(torch.bfloat16)
    exact = [torch.nn.Parameter(p.detach().double()) for p in fused_params]
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(exact, **HYPER)
    train(1, [(fused_params, a), (exact, b)])
    for p, q in zip(fused_params, exact, strict=True):
        # Within one unit in bfloat16's last place (2^-8 relative) of the exact result.
        assert ((p.double() - q).abs() <= q.abs() * 2**-8 + 1e-12).all()


def with_masters(dtype=torch.bfloat16, **more):
    """Returns narrow parameters with master weights and float32 ones with the same values, each with
    their optimizer."""
    narrow = parameters(dtype, **more)
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    return (narrow, FusedAdamW(narrow, **HYPER, master_weights=True)), (
        wide,
        FusedAdamW(wide, **HYPER),
    )


def assert_masters_equal(pairs):
    (narrow, optimizer), (wide, _) = pairs
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], q.detach())
        assert torch.equal(p, q.detach().to(p.dtype))


def test_master_weights_equal_float32_training():
    pairs = with_masters()
    train(20, pairs)
    assert_masters_equal(pairs)
    pure = parameters(torch.bfloat16)
    train(20, [(pure, FusedAdamW(pure, **HYPER))])
    assert not all(torch.equal(p, q) for p, q in zip(pure, pairs[0][0], strict=True))


def test_values_written_to_a_parameter_reach_its_master():
    pairs = with_masters()
    train(2, pairs)
    for params, _ in pairs:
        with torch.no_grad():
            params[0].fill_(0.5)
            params[1].clamp_(-0.25, 0.25)  # leaves some elements unchanged
    before = [pairs[0][1].state[p]["master_param"].clone() for p in pairs[0][0]]
    kept = pairs[0][0][1].detach().float().abs() < 0.25
    train(1, pairs)
    master = pairs[0][1].state[pairs[0][0][0]]["master_param"]
    assert torch.equal(master, pairs[1][0][0])
    assert torch.equal(pairs[0][0][2], pairs[1][0][2].detach().bfloat16())
    assert kept.any() and not kept.all()
    drift = pairs[0][1].state[pairs[0][0][1]]["master_param"] - pairs[1][0][1].detach()
    assert drift[kept].abs().max() == 0 and before[1].shape == kept.shape


@pytest.mark.parametrize("way", ["state_dict", "copy"])
def test_master_weights_survive_a_checkpoint(way):
    pairs = with_masters()
    train(3, pairs)
    (narrow, optimizer), wide = pairs
    if way == "copy":
        narrow, optimizer = copy.deepcopy((narrow, optimizer))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        values = [p.detach().clone() for p in narrow]
        narrow = parameters(torch.bfloat16)
        optimizer = FusedAdamW(narrow, master_weights=True)
        optimizer.load_state_dict(saved)  # before the weights; the order must not matter
        with torch.no_grad():
            for p, value in zip(narrow, values, strict=True):
                p.copy_(value)
    pairs = (narrow, optimizer), wide
    train(3, pairs, 3)
    assert_masters_equal(pairs)


@pytest.mark.parametrize("overflow_at", [None, 2])
def test_grad_scaler(overflow_at):
    """A scaled run equals an unscaled one; a step with an infinite gradient changes nothing."""
    fused_params, plain = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(plain, **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones(()))  # The scaler creates its scale on the first call.
    for seed in range(4):
        set_gradients(seed, fused_params, scale=scaler.get_scale())
        set_gradients(seed, plain)
        if seed == overflow_at:
            fused_params[1].grad[3] = float("inf")
        else:
            b.step()
        scaler.step(a)
        if seed != overflow_at:
            assert error(fused_params[0].grad, plain[0].grad) < 1e-7, "gradients are left unscaled"
        scaler.update()
    assert scaler.get_scale() == (1024.0 if overflow_at is None else 512.0)
    assert not hasattr(a, "grad_scale") and not hasattr(a, "found_inf")
    assert a.state[fused_params[0]]["step"].item() == (4 if overflow_at is None else 3)
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, plain, strict=True))


def test_closure_frozen_and_missing_gradients():
    fused_params, torch_params = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER)
    set_gradients(0, fused_params, torch_params)
    fused_params[1].grad = torch_params[1].grad = None
    before = fused_params[1].detach().clone()
    grad_modes = []

    def closure():
        grad_modes.append(torch.is_grad_enabled())
        return torch.tensor(7.0)

    assert a.step(closure).item() == 7.0 and grad_modes == [True]
    b.step()
    assert torch.equal(fused_params[1], before) and fused_params[1] not in a.state
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


def test_learning_rate_as_a_tensor():
    fused_params, torch_params = parameters(), parameters()
    a = FusedAdamW(fused_params, **(HYPER | {"lr": torch.tensor(1e-2)}))
    b = torch.optim.AdamW(torch_params, **HYPER)
    train(3, [(fused_params, a), (torch_params, b)])
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@pytest.mark.parametrize(
    "settings, shown",
    [
        ({"lr": -1.0}, "-1.0"),
        ({"betas": (1.0, 0.9)}, "1.0"),
        ({"eps": -1e-8}, "-1e-08"),
        ({"weight_decay": -0.1}, "-0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, shown):
    with pytest.raises(ValueError, match=re.escape(shown)):
        FusedAdamW(parameters(), **settings)


def test_amsgrad_state_is_refused():
    torch_params = torch.optim.AdamW(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdamW(parameters()).load_state_dict(torch_params.state_dict())


def test_sparse_gradient_is_refused():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdamW(table.parameters()).step()


def test_copied_optimizers_continue():
    fused_params, torch_params = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER)
    train(2, [(fused_params, a), (torch_params, b)])
    fused_params, a = copy.deepcopy((fused_params, a))
    train(2, [(fused_params, a), (torch_params, b)], 2)
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


def test_one_graph_under_torch_compile():
    fused_params, torch_params = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER)
    torch._dynamo.reset()
    step = torch.compile(lambda: a.step(), backend="aot_eager", fullgraph=True)
    for seed in range(3):
        set_gradients(seed, fused_params, torch_params)
        step()
        b.step()
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


def test_operator_passes_opcheck():
    rows = [[torch.randn(4), torch.randn(3, 2)] for _ in range(3)]
    rows.append([torch.rand(4), torch.rand(3, 2)])
    rows.append([torch.zeros(()), torch.ones(())])
    rows.append([torch.randn(4), torch.randn(3, 2)])
    args = (*rows, 1e-2, None, 0.9, 0.99, 1e-8, 0.1, False, None, None)
    torch.library.opcheck(torch.ops.stepgauge.adamw_.default, args)


# The kernel in the interpreter


@pytest.fixture
def on_kernel(monkeypatch, interpreter):
    """Sends CPU tensors to the kernel, with chunks so small that tensors span several."""
    from stepgauge.kernels.adamw import tables

    launches = []

    def counted(*args, **kwargs):
        launches.append(args)
        return launch(*args, **kwargs)

    make, launch = tables.Tables, tables.launch
    monkeypatch.setattr(package.operator, "_on_kernel_device", lambda tensor: True)
    monkeypatch.setattr(
        tables, "Tables", lambda numels, device, chunk: make(numels, device, chunk=64)
    )
    monkeypatch.setattr(tables, "launch", counted)
    return launches


@needs_triton
@interpreted_only
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-7), (torch.float16, 1e-3)])
@pytest.mark.parametrize("maximize", [False, True])
def test_interp_equals_float64(dtype, tolerance, maximize, on_kernel):
    fused_params = parameters(dtype)
    exact = [torch.nn.Parameter(p.detach().double()) for p in fused_params]
    a = FusedAdamW(fused_params, **HYPER, maximize=maximize)
    b = torch.optim.AdamW(exact, **HYPER, maximize=maximize)
    train(3, [(fused_params, a), (exact, b)])
    assert len(on_kernel) == 3, "one launch a step"
    for p, q in zip(fused_params, exact, strict=True):
        assert error(p, q) < tolerance
        for name in ("exp_avg", "exp_avg_sq"):
            assert a.state[p][name].dtype == torch.float32
            assert error(a.state[p][name], b.state[q][name]) < 3e-7
        assert a.state[p]["step"].item() == 3


@needs_triton
@interpreted_only
def test_interp_master_weights(on_kernel):
    pairs = with_masters(torch.float16, shapes=[(5, 7), (130,), ()])
    train(3, pairs)
    assert len(on_kernel) == 6, "one launch a step"
    for p, q in zip(pairs[0][0], pairs[1][0], strict=True):
        state = pairs[0][1].state[p]
        assert error(state["master_param"], q) < 1e-6
        assert torch.equal(p, state["master_param"].half()) and state["step"] == 3


@needs_triton
@interpreted_only
def test_interp_scale_and_overflow(on_kernel):
    fused_params, plain = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(plain, **HYPER)
    for seed, found in enumerate([0.0, 1.0, 0.0]):
        set_gradients(seed, fused_params, scale=8.0)
        set_gradients(seed, plain)
        a.grad_scale, a.found_inf = torch.tensor(8.0), torch.tensor(found)
        before = [p.detach().clone() for p in fused_params]
        a.step()
        if found:
            assert all(torch.equal(p, q) for p, q in zip(fused_params, before, strict=True))
        else:
            b.step()
            assert error(fused_params[0].grad, plain[0].grad) < 1e-7
    assert a.state[fused_params[0]]["step"].item() == 2
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, plain, strict=True))


@needs_triton
@interpreted_only
@pytest.mark.parametrize("num_parts", [1, 2])
def test_interp_tables_are_built_once(num_parts, on_kernel, monkeypatch):
    """Also for many groups of two types, and for a sharded optimizer, which steps in parts."""
    from stepgauge.kernels.adamw import tables

    built, make = [], tables.Tables
    monkeypatch.setattr(
        tables,
        "Tables",
        lambda numels, *args, **named: built.append(1) or make(numels, *args, **named),
    )
    groups = []
    for number in range(40):
        narrow = parameters(torch.float16, shapes=[(4,), (2,)])
        groups.append([*parameters(shapes=[(3, 2), (5,)]), *narrow])
        groups[-1][0].requires_grad_(number % 2 == 0)
    a = FusedAdamW([{"params": group} for group in groups], **HYPER)
    fields = [{k: v for k, v in group.items() if k != "params"} for group in a.param_groups]
    for seed in range(3):
        for group in groups:
            set_gradients(seed, [p for p in group if p.requires_grad])
        for part in range(num_parts):
            a.param_groups = [
                {**each, "params": group[part::num_parts]}
                for each, group in zip(fields, groups, strict=True)
            ]
            a.step()
    without_trained = 20 if num_parts == 2 else 0  # parts whose only fp32 parameter is frozen
    assert len(built) == 2 * num_parts * 40 - without_trained


@needs_triton
@interpreted_only
def test_interp_what_is_kept_of_replaced_parameters_is_freed(on_kernel):
    optimizer, replaced = FusedAdamW(parameters(shapes=[(3,)]), **HYPER), []
    for seed in range(5):
        (old,) = optimizer.param_groups[0]["params"]
        set_gradients(seed, [old])
        optimizer.step()
        new = torch.nn.Parameter(old.detach().clone())
        optimizer.state[new] = optimizer.state.pop(old)
        optimizer.param_groups[0]["params"] = [new]
        replaced.append(weakref.ref(old))
    del old
    gc.collect()
    assert sum(each() is not None for each in replaced) == 1


@needs_triton
@interpreted_only
def test_interp_tensor_learning_rate(on_kernel):
    fused_params, torch_params = parameters(), parameters()
    a = FusedAdamW(fused_params, **(HYPER | {"lr": torch.tensor(1e-2)}))
    b = torch.optim.AdamW(torch_params, **HYPER)
    train(2, [(fused_params, a), (torch_params, b)])
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@needs_triton
@interpreted_only
def test_interp_mixed_types_and_layouts(on_kernel):
    """One launch per pair of types; with transposed and sliced parameters and transposed gradients."""

    def make(cls):
        torch.manual_seed(0)
        base = torch.randn(6, 9)
        params = [
            torch.nn.Parameter(base.clone().t()),
            torch.nn.Parameter(torch.randn(4, 8)),
            torch.nn.Parameter(torch.randn(8, 8)[:, ::2]),
            torch.nn.Parameter(torch.randn(7).half()),
        ]
        return params, cls(params, **HYPER)

    fused_params, a = make(FusedAdamW)
    torch_params, b = make(torch.optim.AdamW)
    for seed in range(2):
        set_gradients(seed, fused_params, torch_params)
        fused_params[1].grad = fused_params[1].grad.t().contiguous().t()
        a.step()
        b.step()
    # float32 and float16: two launches a step; the parameter that is not dense uses the oracle.
    assert len(on_kernel) == 4
    for p, q in zip(fused_params[:3], torch_params[:3], strict=True):
        assert error(p, q) < 1e-6
    assert error(fused_params[3], torch_params[3]) < 2e-3


@needs_triton
@interpreted_only
def test_interp_follows_tensors_that_move(on_kernel):
    """New gradients, a parameter moved to other memory, loaded state, and a late first gradient."""
    fused_params, torch_params = parameters(), parameters()
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER)
    set_gradients(0, fused_params, torch_params)
    fused_params[2].grad = torch_params[2].grad = None
    a.step()
    b.step()
    train(2, [(fused_params, a), (torch_params, b)], 1)
    fused_params[0].data = fused_params[0].data.clone()
    train(1, [(fused_params, a), (torch_params, b)], 3)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    train(2, [(fused_params, a), (torch_params, b)], 4)
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))
    assert [a.state[p]["step"].item() for p in fused_params] == [6, 6, 5, 6, 6]


@needs_triton
@interpreted_only
def test_interp_unchanged_addresses_are_not_sent_again(on_kernel, monkeypatch):
    from stepgauge.kernels.adamw import tables

    fused_params = parameters()
    a = FusedAdamW(fused_params, **HYPER)
    train(1, [(fused_params, a)])
    sent = []
    send = tables._send
    monkeypatch.setattr(tables, "_send", lambda *args: sent.append(args) or send(*args))
    a.step()
    assert not sent, "the same addresses"
    fused_params[0].grad = fused_params[0].grad.clone()
    a.step()
    assert len(sent) == 1 and sent[0][0].numel() == 5 * len(fused_params), "one table, once"


@needs_triton
@interpreted_only
def test_interp_operator(on_kernel):
    fused_params, torch_params = parameters(), parameters()
    set_gradients(0, fused_params, torch_params)
    b = torch.optim.AdamW(torch_params, **HYPER)
    b.step()
    moments = [[torch.zeros_like(p) for p in fused_params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in fused_params]
    with torch.no_grad():
        lists = fused_params, [p.grad for p in fused_params], *moments, steps, []
        lr, betas, eps, decay = (HYPER[name] for name in ("lr", "betas", "eps", "weight_decay"))
        torch.ops.stepgauge.adamw_(*lists, lr, None, *betas, eps, decay, False, None, None)
    assert len(on_kernel) == 1 and steps[3].item() == 1
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@needs_triton
@compiled_only
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "bf16-master"])
def test_kernel_compiles_wide_and_without_spills(arch, dtype):
    import triton.language as tl

    from stepgauge.kernels.adamw import triton as kernels

    has_master, dtype = dtype.endswith("-master"), dtype.removesuffix("-master")
    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    kernel, shape = kernels.adamw_kernel, kernels.SHAPES[4 if dtype == "fp32" else 2]
    options = {"PARAM_TYPE": types[dtype], "GRAD_TYPE": types[dtype], "ALIGNED": True}
    options |= {
        "CHUNK": shape.chunk,
        "BLOCK": shape.block,
        "MAXIMIZE": False,
    }
    options |= {"HAS_LR": False, "HAS_SCALE": True, "HAS_FOUND_INF": True}
    options["HAS_MASTER"] = has_master
    pointers = {
        "chunk_ptr": "*i32",
        "numel_ptr": "*i64",
        "table_ptr": "*i64",
        "counter_ptr": "*i32",
    }
    names = [name for name in kernel.arg_names if name not in options and name != "lr_ptr"]
    aligned = [name for name in names if name.endswith("_ptr")]
    numbers = {name: "i32" if name.startswith("num_") else "fp32" for name in names}
    signature = numbers | {name: pointers.get(name, "*fp32") for name in aligned}
    compiled = compile_ahead(
        kernel, arch, signature, options, aligned=aligned, options={"num_warps": shape.num_warps}
    )
    # An address from a table has no known alignment; the hint must reach loads and stores.
    assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 6
    assert compiled.asm["ptx"].count("st.global.v4.b32") >= 5
    assert resources_of(compiled)["stack"] == 0


# On a GPU


GPU_SHAPES = [(1000, 513), (3, 7), (), (16384,), (16385,), (40000,), (2560,), (1,)]


@gpu
@needs_gpu
def test_gpu_equals_float64_over_1000_steps():
    fused_params, torch_params, exact = (
        parameters(dtype, "cuda", GPU_SHAPES)
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    a = FusedAdamW(fused_params, **HYPER)
    b = torch.optim.AdamW(torch_params, **HYPER, fused=True)
    c = torch.optim.AdamW(exact, **HYPER)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(1000):
        for p, q, r in zip(fused_params, torch_params, exact, strict=True):
            gradient = torch.randn(p.shape, generator=generator, device="cuda")
            p.grad, q.grad, r.grad = gradient, gradient.clone(), gradient.double()
        for optimizer in (a, b, c):
            optimizer.step()
    for p, q, r in zip(fused_params, torch_params, exact, strict=True):
        assert error(p, r) < 1e-5 and error(p, q) < 1e-4
        assert error(a.state[p]["exp_avg_sq"], c.state[r]["exp_avg_sq"]) < 1e-6
        assert a.state[p]["step"].item() == 1000


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_narrow_parameters(dtype):
    fused_params = parameters(dtype, "cuda", GPU_SHAPES)
    exact = [torch.nn.Parameter(p.detach().double()) for p in fused_params]
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(exact, **HYPER)
    for seed in range(3):
        for p, q in zip(fused_params, exact, strict=True):
            q.data.copy_(p)  # Compare single steps, so that roundings do not accumulate.
        set_gradients(seed, fused_params, exact)
        a.step()
        b.step()
        unit = torch.finfo(dtype).eps
        for p, q in zip(fused_params, exact, strict=True):
            assert ((p.double() - q).abs() <= q.abs() * unit + 1e-7).all()
            assert error(a.state[p]["exp_avg"], b.state[q]["exp_avg"]) < 1e-6


@gpu
@needs_gpu
def test_gpu_master_weights():
    exact = parameters(torch.bfloat16, shapes=[(1000, 513), (7,), ()])
    exact = [torch.nn.Parameter(p.detach().double()) for p in exact]
    pairs = with_masters(device="cuda", shapes=[(1000, 513), (7,), ()])
    pairs = *pairs, (exact, torch.optim.AdamW(exact, **HYPER))
    train(100, pairs)
    assert_masters_equal(pairs[:2])
    for p, q in zip(pairs[0][0], exact, strict=True):
        assert error(pairs[0][1].state[p]["master_param"], q) < 1e-5


@gpu
@needs_gpu
def test_gpu_step_never_synchronises():
    fused_params = parameters(device="cuda", shapes=GPU_SHAPES)
    a = FusedAdamW(fused_params, **HYPER)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    scaler.scale(torch.ones((), device="cuda"))

    def step(seed):
        for p in fused_params:
            p.grad = torch.full_like(p, 0.25 * seed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(a)
            a.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()

    for seed in range(1, 12):
        step(seed)
    assert a.state[fused_params[0]]["step"].item() == 11


@gpu
@needs_gpu
def test_gpu_grad_scaler_skips_on_overflow():
    fused_params, plain = parameters(device="cuda"), parameters(device="cuda")
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(plain, **HYPER)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    for seed in range(3):
        set_gradients(seed, fused_params, scale=scaler.get_scale())
        set_gradients(seed, plain)
        if seed == 1:
            fused_params[1].grad[3] = float("nan")
        else:
            b.step()
        scaler.step(a)
        scaler.update()
    assert scaler.get_scale() == 512.0 and a.state[fused_params[0]]["step"].item() == 2
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, plain, strict=True))


@gpu
@needs_gpu
def test_gpu_loads_torchs_host_steps_and_unaligned_memory():
    storage = torch.randn(4097, device="cuda")
    fused_params = [torch.nn.Parameter(storage[1:]), *parameters(device="cuda")]
    torch_params = [torch.nn.Parameter(p.detach().clone()) for p in fused_params]
    b = torch.optim.AdamW(torch_params, **HYPER)  # keeps its steps on the host
    train(1, [(torch_params, b)])
    for p, q in zip(fused_params, torch_params, strict=True):
        p.data.copy_(q)
    a = FusedAdamW(fused_params)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    train(3, [(fused_params, a), (torch_params, b)], 1)
    assert a.state[fused_params[0]]["step"].device.type == "cuda"
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@gpu
@needs_gpu
def test_gpu_one_launch_for_a_group():
    fused_params = parameters(device="cuda", shapes=[(300, 7)] * 50)
    a = FusedAdamW(fused_params, **HYPER)
    train(2, [(fused_params, a)])
    set_gradients(2, fused_params)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        a.step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if "mem" not in e.name.lower()]
    assert sum("adamw_kernel" in name for name in kernels) == 1, kernels


@gpu
@needs_gpu
def test_gpu_captured_in_a_graph():
    fused_params, torch_params = parameters(device="cuda"), parameters(device="cuda")
    a, b = FusedAdamW(fused_params, **HYPER), torch.optim.AdamW(torch_params, **HYPER)
    set_gradients(0, fused_params, torch_params)
    a.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    graph.replay()
    graph.replay()
    for _ in range(3):
        b.step()
    assert a.state[fused_params[0]]["step"].item() == 3
    assert all(error(p, q) < 1e-6 for p, q in zip(fused_params, torch_params, strict=True))


@gpu
@needs_gpu
def test_gpu_beyond_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    numel = 2**31 + 5000
    p = torch.nn.Parameter(torch.ones(numel, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    FusedAdamW([p], lr=0.5, weight_decay=0.0).step()
    # The first step moves each parameter by lr against the gradient's sign.
    assert (p[-6000:] == 0.5).all() and (p[:: numel // 997] == 0.5).all()
