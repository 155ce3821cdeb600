"""Gradients averaged in a narrower type than the parameters': what each becomes, and which are
taken before autograd widens them. Two ranks over Gloo."""

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.parallel import test_data_parallel
from tests.parallel.networks import batch, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.parallel.data_parallel import BucketedDataParallel, NaiveDataParallel
from stepgauge.parallel.narrow import NarrowGradients
from stepgauge.runtime.launch import launch

BF16 = torch.bfloat16


def in_lists(module, **how):
    wrapped = BucketedDataParallel(module, bucket_mb=0.0005, **how)
    wrapped.averager.takes_lists = lambda device: True
    return wrapped


WRAPPERS = {
    "in lists": in_lists,
    "naive": NaiveDataParallel,
    "bucketed": lambda module, **how: BucketedDataParallel(module, bucket_mb=0.0005, **how),
    "one bucket": lambda module, **how: BucketedDataParallel(module, bucket_mb=1000, **how),
}
ROUNDING = 2**-8  # of bf16, relative: of a sum of halves, once


def autocast():
    return torch.autocast(torch.get_default_device().type, BF16)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(all_checks, ranks=2)


def all_checks():
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error) or "failed"
    try:
        NaiveDataParallel(Layer(), reduce_dtype=torch.int8)
    except ValueError as error:
        found["integers"] = str(error)
    return found


def float64_in_float32():
    """Parity as of the other wrappers, with clipping and accumulation, to float32 and not to
    float64.
    """
    test_data_parallel.WRAPPERS["narrow"] = lambda module: BucketedDataParallel(
        module, bucket_mb=0.0005, reduce_dtype=torch.float32
    )
    for network in test_data_parallel.NETWORKS:
        difference = test_data_parallel.difference_from_one_process("narrow", network, "sgd")
        assert 1e-12 < difference < 1e-5, (network, difference)


def transformer():
    return make("transformer", seed=0).float()


def loss_of(module, micro, rank):
    return module(*batch(0, micro, rank))


def means(module, *micros):
    """What one process has of all ranks' batches under autocast, the mean in float32."""
    for rank in range(2):
        for micro in micros:
            with autocast():
                loss = loss_of(module, micro, rank)
            (loss / 2).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def require_rounded(module, wanted):
    for name, parameter in module.named_parameters():
        got, want = parameter.grad, wanted[name]
        assert (got is None) == (want is None), name
        if got is None:
            continue
        assert got.dtype == torch.float32 and torch.equal(got, got.to(BF16).float()), (
            f"{name} is not what bf16 holds"
        )
        # A part is rounded where it did not come in bf16, and the mean is.
        assert (got - want).abs().max() <= 3 * ROUNDING * want.abs().max(), name


def of_a_wrapper(name):
    def check():
        wrapped = WRAPPERS[name](transformer(), reduce_dtype=BF16)
        taken = noting_what_is_taken(wrapped)
        for _ in range(2):
            wrapped.zero_grad()
            with autocast():
                loss = loss_of(wrapped, 0, dist.get_rank())
            loss.backward()
            wrapped.finish_gradient_synchronization()
        layers = {n: m for n, m in wrapped.module.named_modules() if isinstance(m, nn.Linear)}
        assert (
            sorted(taken) == sorted([f"{n}.weight" for n in layers if n != "head"] * 2)
            and len(taken) > 4
        ), taken
        require_rounded(wrapped.module, means(transformer(), 0))

    return check


def noting_what_is_taken(wrapped):
    taken, take = [], wrapped._take
    wrapped._take = lambda name, *rest, **more: taken.append(name) or take(name, *rest, **more)
    return taken


def second_backward():
    """Accumulated, then added to a mean; and each time the sum of what came in both types."""
    for accumulates in (False, True):
        wrapped = BucketedDataParallel(transformer(), 0.0005, reduce_dtype=BF16)
        for micro in range(2):
            with wrapped.no_sync() if accumulates and micro == 0 else contextlib.nullcontext():
                with autocast():
                    loss = loss_of(wrapped, micro, dist.get_rank())
                loss.backward()
        wrapped.finish_gradient_synchronization()
        require_rounded(wrapped.module, means(transformer(), 0, 1))


def unused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.of_one, self.never = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x, both):
            return self.used(x).sum() + (self.of_one(x).sum() if both else 0)

    torch.manual_seed(0)
    wrapped = BucketedDataParallel(Two(), reduce_dtype=BF16)
    for _ in range(2):
        wrapped.zero_grad()
        with autocast():
            wrapped(torch.ones(2, 4), dist.get_rank() == 0).backward()
        wrapped.finish_gradient_synchronization()
        module = wrapped.module
        assert module.never.weight.grad is None
        assert module.used.weight.grad.eq(2).all() and module.of_one.weight.grad.eq(1).all()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x).sum()


def ones():
    return torch.ones(2, 4) * (1 + dist.get_rank())


def twice():
    """Read twice in a forward, in two forwards, in float32 too: a backward brings it once."""

    class Both(Layer):
        def forward(self, x):
            with autocast():
                with torch.autocast(torch.get_default_device().type, enabled=False):
                    wide = self.layer(x)
                return (self.layer(x) + self.layer(2 * x)).float().sum() + wide.sum()

    wrapped = NaiveDataParallel(Both(), reduce_dtype=BF16)
    syncs, synchronize = [], wrapped.synchronize_gradients
    wrapped.synchronize_gradients = lambda: syncs.append(1) or synchronize()
    # more forwards on one rank than on the other
    sum(wrapped(ones()) for _ in range(1 + dist.get_rank())).backward()
    wrapped.finish_gradient_synchronization()
    assert syncs == [1]
    assert wrapped.module.layer.weight.grad.eq((1 * 8 + 2 * 2 * 8) / 2).all()


def accumulated_after():
    """In no_sync what comes is this rank's own, also beside gradients that are on their way."""
    for of_owner in (None, {"layer.weight": 0}):
        wrapped = BucketedDataParallel(Layer(), reduce_dtype=BF16, owners=of_owner)
        plain = BucketedDataParallel(Layer(), owners=of_owner)
        for each in (wrapped, plain):
            with autocast():
                each(ones()).backward()
                if of_owner:
                    each.finish_gradient_synchronization()
                with each.no_sync():
                    each(ones()).backward()
                if of_owner:
                    each(ones()).backward()
            each.finish_gradient_synchronization()
        got, want = wrapped.module.layer.weight.grad, plain.module.layer.weight.grad
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want)), (
            got,
            want,
        )


def types_apart():
    """Parameters that have the narrow type themselves, and complex ones, do not travel with
    narrowed ones.
    """
    for first_is_narrow in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(
            [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, dtype=BF16)]
        )
        layers += [nn.Linear(4, 4, bias=False, dtype=torch.complex64) for _ in range(2)]
        order = [layers[i] for i in ((1, 2, 3, 0) if first_is_narrow else (0, 1, 2, 3))]
        for lists in (False, True):
            module = nn.ModuleList(order)
            module.zero_grad()
            wrapped = BucketedDataParallel(module, reduce_dtype=BF16)
            wrapped.averager.takes_lists = lambda device, lists=lists: lists
            scale = 1 + dist.get_rank()
            sum((scale * layer.weight).abs().float().sum() for layer in module).backward()
            wrapped.finish_gradient_synchronization()
            for layer in module:
                want = 1.5 * torch.sgn(layer.weight.detach())
                assert layer.weight.grad.dtype == layer.weight.dtype
                assert (layer.weight.grad - want).abs().max() < 0.02, layer.weight.dtype


def left_alone():
    """A weight that others watch has its gradient as always, and so has one whose wrapper is gone."""
    module = Layer()
    wrapped = NaiveDataParallel(module, reduce_dtype=BF16)
    seen = []
    module.layer.weight.register_hook(seen.append)
    with autocast():
        wrapped(ones()).backward()
    wrapped.finish_gradient_synchronization()
    assert len(seen) == 1 and seen[0].eq(2 * (1 + dist.get_rank())).all()
    assert module.layer.weight.grad.eq(3).all()
    module = Layer()
    gone = weakref.ref(NaiveDataParallel(module, reduce_dtype=BF16))
    gc.collect()
    assert gone() is None
    with autocast():
        module(ones()).backward()
    assert module.layer.weight.grad.eq(2 * (1 + dist.get_rank())).all()
    again = NaiveDataParallel(Layer(), reduce_dtype=BF16)
    other = copy.deepcopy(again.module)
    assert pickle.loads(pickle.dumps(again.module)).state_dict().keys() == other.state_dict().keys()
    with autocast():
        other(ones()).backward()
    assert other.layer.weight.grad is not None


def not_accumulated():
    """torch.autograd.grad has its gradients and leaves nothing behind; so has a hook that came
    after the forward.
    """
    wrapped = NaiveDataParallel(Layer(), reduce_dtype=BF16)
    weight = wrapped.module.layer.weight
    with autocast():
        loss = wrapped(ones())
    (asked,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert asked.eq(2 * (1 + dist.get_rank())).all() and weight.grad is None
    loss.backward(retain_graph=True)
    wrapped.finish_gradient_synchronization()
    assert weight.grad.eq(3).all()
    wrapped.zero_grad()
    weight.register_hook(lambda gradient: 2 * gradient)
    loss.backward()
    wrapped.finish_gradient_synchronization()
    assert weight.grad.eq(6).all()


class Sum(nn.Linear):
    """A layer whose weight is read as the sum of another's and its own: autograd gives both one and
    the same tensor.
    """

    def forward(self, x):
        return nn.functional.linear(x, self.other[0].to(BF16) + self.weight.to(BF16))


def shared_by_autograd():
    class Both(Layer):
        def __init__(self):
            super().__init__()
            self.sum = Sum(4, 4, bias=False)
            self.sum.other = [self.layer.weight]

        def forward(self, x):
            return self.sum(x).sum()

    for lists in (False, True):
        wrapped = BucketedDataParallel(Both(), 0 if not lists else 1, reduce_dtype=BF16)
        wrapped.averager.takes_lists = lambda device, lists=lists: lists
        taken = noting_what_is_taken(wrapped)
        with autocast():
            wrapped(ones()).backward()
        wrapped.finish_gradient_synchronization()
        assert taken == ["sum.weight"]
        assert all(parameter.grad.eq(3).all() for parameter in wrapped.parameters())


def after_a_failure():
    """What a backward that failed had computed of a weight is gone; a later backward has its own
    alone.
    """
    for arrives, synchronises in ((False, False), (False, True), (True, True)):
        wrapped, plain = (
            BucketedDataParallel(Layer(), reduce_dtype=dtype) for dtype in (BF16, None)
        )
        for each in (wrapped, plain):
            with autocast():
                first, second = each(ones()), each(100 * ones())
            if arrives:
                first.backward()
            cast = the_cast(second, each.module.layer.weight)
            handle = cast.register_prehook(fails)  # after what keeps the gradient
            with pytest.raises(InterruptedError):
                second.backward()
            handle.remove()
            if synchronises:
                each.finish_gradient_synchronization()
                assert each is plain or not each._kept._sums
            for accumulates in (True, False):
                each.zero_grad()
                for micro in range(2):
                    with (
                        each.no_sync() if micro < accumulates else contextlib.nullcontext(),
                        autocast(),
                    ):
                        each(ones()).backward()
                each.finish_gradient_synchronization()
                assert each.module.layer.weight.grad.eq(6).all(), (
                    each is wrapped,
                    arrives,
                    synchronises,
                )


def fails(_):
    raise InterruptedError


def the_cast(loss, weight):
    nodes = [loss.grad_fn]
    for node in nodes:
        leaf = node.next_functions[0][0] if node.next_functions else None
        if node.name() == "ToCopyBackward0" and getattr(leaf, "variable", None) is weight:
            return node
        nodes += [above for above, _ in node.next_functions if above is not None]
    raise AssertionError("no cast")


def read_often():
    """Each read brings a gradient: their sum is kept, not all of them, and rounded once."""

    class Often(Layer):
        def forward(self, x):
            for _ in range(8):
                with torch.autocast(torch.get_default_device().type, BF16, cache_enabled=False):
                    x = x + self.layer(x).float().tanh()
            return x.sum()

    wrapped = NaiveDataParallel(Often(), reduce_dtype=BF16)
    most, look = [0], wrapped._kept._keep
    wrapped._kept._keep = lambda *of: look(*of) or most.append(len(wrapped._kept._sums))
    wrapped(ones()).backward()
    wrapped.finish_gradient_synchronization()
    assert len(most) == 9 and max(most) == 1
    wanted = means_of(Often())
    assert (
        wrapped.module.layer.weight.grad - wanted
    ).abs().max() <= 2 * ROUNDING * wanted.abs().max()


def means_of(module):
    for rank in range(2):
        (module(torch.ones(2, 4) * (1 + rank)) / 2).backward()
    return module.layer.weight.grad


def wrapped_again():
    module, count = Layer(), []
    for _ in range(2):
        wrapped = NaiveDataParallel(module, reduce_dtype=BF16)
        taken = noting_what_is_taken(wrapped)
        with autocast():
            wrapped(ones()).backward()
        wrapped.finish_gradient_synchronization()
        count.append(len(taken))
        wrapped._take = taken = None
        del wrapped
        gc.collect()
    assert (
        count == [1, 1]
        and not module.layer._forward_hooks
        and not module.layer.weight._backward_hooks
    )


def checkpointed():
    """Of both kinds: what is computed again gives the gradient of the layer once."""
    for reentrant in (False, True):

        class Again(Layer):
            def forward(self, x):
                return checkpoint(self.layer, x, use_reentrant=reentrant).sum()  # noqa: B023

        wrapped = BucketedDataParallel(Again(), reduce_dtype=BF16)
        with autocast():
            loss = wrapped(ones().requires_grad_())
        loss.backward()
        wrapped.finish_gradient_synchronization()
        assert wrapped.module.layer.weight.grad.eq(3).all(), reentrant


def by_owners():
    module = transformer()
    owners = {name: index % 2 for index, (name, _) in enumerate(module.named_parameters())}
    wrapped = BucketedDataParallel(module, 0.0005, owners=owners, reduce_dtype=BF16)
    with autocast():
        loss = loss_of(wrapped, 0, dist.get_rank())
    loss.backward()
    wrapped.finish_gradient_synchronization()
    wanted = means(transformer(), 0)
    require_rounded(
        module, {n: g if owners[n] == dist.get_rank() else None for n, g in wanted.items()}
    )


CHECKS = {
    "float64 in float32": float64_in_float32,
    **{name: of_a_wrapper(name) for name in WRAPPERS},
    "second backward": second_backward,
    "unused": unused,
    "twice": twice,
    "by owners": by_owners,
    "accumulated after": accumulated_after,
    "types apart": types_apart,
    "left alone": left_alone,
    "checkpointed": checkpointed,
    "not accumulated": not_accumulated,
    "wrapped again": wrapped_again,
    "shared by autograd": shared_by_autograd,
    "after a failure": after_a_failure,
    "read often": read_often,
}


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(two_ranks, check):
    assert [rank[check] for rank in two_ranks] == ["", ""]


def test_a_type_that_does_not_float(two_ranks):
    assert (
        two_ranks[0]["integers"]
        == "reduce_dtype is torch.int8; gradients are averaged in floating types"
    )


class Block(Layer):
    def forward(self, x):
        return self.layer(x).tanh().float()


def graphs_of_blocks(narrows):
    graphs = []
    blocks = nn.Sequential(*[Block() for _ in range(12)])
    names = {parameter: name for name, parameter in blocks.named_parameters()}
    narrow = NarrowGradients(blocks, BF16, names, own_hooks=0) if narrows else None
    torch._dynamo.reset()
    compiler = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    for block in blocks:
        block.compile(backend=compiler)
    with autocast():
        blocks(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert narrow is None or all(narrow.fetch(name) is None for name in names.values())
    assert all(parameter.grad is not None for parameter in blocks.parameters())
    return len(graphs)


def test_compiled_blocks_are_compiled_as_often_as_without():
    """The hook is one for all layers, and steps aside."""
    assert graphs_of_blocks(True) == graphs_of_blocks(False) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gradient_of_another_stream_is_waited_for():
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    # on the stream on which it is first used: this one
    accumulating = layer.weight.view_as(layer.weight).grad_fn
    narrow = NarrowGradients(layer, BF16, {layer.weight: "weight"}, own_hooks=1)
    fetched = []
    layer.weight.register_hook(lambda _: fetched.append(narrow.fetch("weight").clone()))
    side = torch.cuda.Stream()
    x = torch.ones(64, 1024, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.autocast("cuda", BF16):
        y = layer(x)
        y.register_hook(lambda gradient: torch.cuda._sleep(10**9))  # half a second
    torch.cuda.current_stream().wait_stream(side)
    y.float().sum().backward()
    assert fetched[0].eq(64).all() and accumulating is not None


def test_the_kernel_widens_too():
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    script = """if True:
        import torch
        from stepgauge.parallel.widening import _in_one_pass
        for dtype in (torch.bfloat16, torch.float16):
            for numel in (1, 5000):
                narrow = torch.randn(numel + 1).to(dtype)[1:]
                wide = torch.full((numel,), float("nan"))
                _in_one_pass(wide, narrow)
                assert torch.equal(wide, narrow.float()), dtype
        print("equal")
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr
