"""Ring attention and head exchange compared with attention in one process, and a whole step."""

import contextlib
import copy
import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist

from stepgauge.kernels.attention import attention
from stepgauge.kernels.attention.partial import partial_backward, partial_forward
from stepgauge.models.checkpointing import through_blocks
from stepgauge.models.parts import sdpa
from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.communication import copied_all_to_all
from stepgauge.parallel.context_parallel import head_exchange
from stepgauge.parallel.context_parallel.head_exchange import HeadExchange
from stepgauge.parallel.context_parallel.ring_attention import PartialAttention, RingAttention
from stepgauge.parallel.data_parallel import BucketedDataParallel
from stepgauge.runtime.imagined_world import imagined_world
from stepgauge.runtime.launch import launch
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.context import chunk_slice, plan_ring, ring_positions

ATTENTION = PartialAttention(partial_forward, partial_backward)
SPEC = ModelSpec(
    vocab_size=13,
    context_length=32,
    d_model=16,
    d_ff=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_pair_of_a_query_and_a_key_is_in_one_step_of_the_ring(ranks):
    length = 4 * ranks
    for is_causal in (True, False):
        counts = torch.zeros(length, length, dtype=torch.int64)
        for rank in range(ranks):
            for step in plan_ring(rank, ranks, is_causal=is_causal):
                queries = ring_positions(length, rank, ranks)[chunk_slice(step.queries, 4)]
                keys = ring_positions(length, step.source, ranks)[chunk_slice(step.keys, 4)]
                for i, query in enumerate(queries):
                    for j, key in enumerate(keys):
                        counts[query, key] += i >= j or not step.is_causal
        expected = torch.ones_like(counts)
        assert torch.equal(counts, expected.tril() if is_causal else expected)


def on_ranks(_):
    context = RingAttention(dist.group.WORLD, ATTENTION)
    for is_causal in (True, False):
        for kv_heads in (4, 2, 1):
            compare_attention(context, is_causal, kv_heads, torch.float64, 1e-12)
    compare_attention(context, True, 4, torch.bfloat16, 2e-2)
    context.communicates = False
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    context.attend(q, q, q).sum().backward()  # does not wait for other ranks
    context.communicates = True
    for by_copies in (True, False):
        heads = HeadExchange(dist.group.WORLD, by_copies)
        with arriving_when_waited_for():
            for is_causal in (True, False):
                for kv_heads in (4, 8, 16):
                    compare_heads(heads, is_causal, kv_heads, torch.float64, 1e-12)
            compare_penalty(heads)
        compare_heads(heads, True, 4, torch.bfloat16, 2e-2)
    heads.communicates = False
    check_shapes_without_communication(heads)
    heads.communicates = True
    with pytest.raises(ValueError, match=f"3 key heads, which {heads.ranks} ranks do not"):
        heads.attend(sdpa, *(torch.ones(1, 3, 8, 4) for _ in range(3)))
    ring = functools.partial(context.attend, is_causal=True)
    causal = functools.partial(sdpa, is_causal=True)
    compare_step(context, ring, positions="learned")
    compare_step(context, ring, compiled=True)
    for by_copies in (True, False):
        heads = HeadExchange(dist.group.WORLD, by_copies)
        attend = functools.partial(heads.attend, causal)
        compare_step(heads, attend, compiled=True, num_kv_heads=4)
    with pytest.raises(ValueError, match="33 tokens; context parallel over"):
        context.piece(torch.zeros(1, 33))
    compile_once()
    refuse()
    return context.rank


@contextlib.contextmanager
def arriving_when_waited_for():
    """Copied messages are NaN until they are waited for, as they may be on a GPU."""
    outboxes, wait_for = copied_all_to_all._Outboxes, head_exchange.wait_for
    exchange, fetch = outboxes.exchange, outboxes._fetch
    in_flight = {}

    def exchange_later(self, x_M):
        self.fetches = []
        y_M = exchange(self, x_M).fill_(math.nan)
        in_flight[y_M.data_ptr()] = self, self.fetches, y_M
        return y_M

    def fetch_and_wait(y_M):
        own, fetches, _ = in_flight.pop(y_M.data_ptr(), (None, [], None))
        for arguments in fetches:
            fetch(own, *arguments)
        return wait_for(y_M)

    outboxes.exchange, head_exchange.wait_for = exchange_later, fetch_and_wait
    outboxes._fetch = lambda self, *arguments: self.fetches.append(arguments)
    try:
        yield
    finally:
        outboxes.exchange, outboxes._fetch, head_exchange.wait_for = exchange, fetch, wait_for
    assert not in_flight, "everything is waited for"


def compare_heads(context, is_causal, kv_heads, dtype, tolerance, **sizes):
    """Compares head exchange around torch's own attention, which knows nothing of ranks."""

    def attend(*qkv, is_causal):
        return context.attend(functools.partial(sdpa, is_causal=is_causal), *qkv)

    compare_attention(
        context, is_causal, kv_heads, dtype, tolerance, attend=attend, heads=16, **sizes
    )


def compare_penalty(context):
    """Compares the gradients of a loss with a gradient penalty, which need second derivatives."""

    def plain(q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    def backward(attend, qkv, factor):
        loss = (attend(*qkv) * factor).sum()
        gradients = torch.autograd.grad(loss, qkv, create_graph=True)
        (loss + sum(each.square().sum() for each in gradients)).backward()

    torch.manual_seed(0)
    widths = (4, 4, 6, 6)  # values may be wider than keys
    *wholes, factor = (torch.randn(2, 8, 16, width, dtype=torch.float64) for width in widths)
    pieces = [context.piece(x, dim=2).requires_grad_() for x in wholes]
    wholes = [x.requires_grad_() for x in wholes]
    backward(plain, wholes, factor)
    backward(functools.partial(context.attend, plain), pieces, context.piece(factor, dim=2))
    for piece, expected in zip(pieces, wholes, strict=True):
        torch.testing.assert_close(context.whole(piece.grad, dim=2), expected.grad)


def check_shapes_without_communication(context):
    """Without communication results are wrong but have the right shape."""
    q = torch.randn(1, 4, 8, 8, requires_grad=True)
    o = context.attend(sdpa, q, q, q)
    o.sum().backward()
    assert o.shape == q.shape == q.grad.shape


def compile_once():
    """Rings over the same ranks share a graph: torch leaves the ninth graph of a function eager. Their
    backward works after they are freed.
    """
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def attend(ring, q):
        return ring.attend(q, 2 * q, 3 * q)

    for _ in range(2):
        q = torch.ones(1, 2, 4, 8, requires_grad=True)
        attend(RingAttention(dist.group.WORLD, ATTENTION), q).sum().backward()
    assert len(graphs) == 1


def refuse():
    """Errors before and after keys are sent, after which the ranks can continue."""
    context = RingAttention(dist.group.WORLD, ATTENTION)
    odd, even = (torch.ones(1, 2, length, 4, dtype=torch.float64) for length in (5, 4))
    for q, k in ((odd, odd), (even, odd), (odd, even)):
        with pytest.raises(ValueError, match=r"5 tokens on this rank; .* two equal chunks"):
            context.attend(q, k, k)
    torch.testing.assert_close(context.attend(odd, odd, odd, is_causal=False), odd)
    with pytest.raises(ValueError, match="scale"):
        context.attend(even, even, even, scale=0.0)
    q = even.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"ring attention, .* has no second derivative"):
        torch.autograd.grad(context.attend(q, q, q).sum(), q, create_graph=True)
    compare_attention(context, True, 4, torch.float64, 1e-12)


def compare_attention(
    context, is_causal, kv_heads, dtype, tolerance, *, length=32, width=8, heads=4, attend=None
):
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, number, length, width, dtype=torch.float64).to(dtype)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    pieces = [context.piece(x, dim=2).requires_grad_() for x in (q, k, v)]
    o = (attend or context.attend)(*pieces, is_causal=is_causal)
    o.backward(context.piece(grad, dim=2))
    wholes = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(heads // kv_heads, dim=1) for x in wholes[1:]]
    expected, _ = attention(wholes[0], *repeated, is_causal=is_causal)
    expected.backward(grad.double())
    all_expected = [expected.detach(), *(x.grad for x in wholes)]
    all_actual = [o.detach(), *(x.grad for x in pieces)]
    for actual, expected in zip(all_actual, all_expected, strict=True):
        assert actual.dtype == dtype
        whole = context.whole(actual, dim=2).double()
        torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)


def compare_step(context, attend, *, compiled=False, **fields):
    """Compares two steps of SGD in which each rank has some tokens and gradients are averaged as in
    data parallel.

    compiled  compiles each block as a single graph, in which it checkpoints itself
    """
    reference = TransformerLM(dataclasses.replace(SPEC, **fields), seed=1).double()
    parallel = copy.deepcopy(reference)
    for block in parallel.blocks:
        block.attention.attend = attend
        if compiled:
            block.compile(backend="aot_eager", fullgraph=True)
    if compiled:
        parallel.through_blocks = through_blocks("selective", 1, compiled_blocks=True)
    wrapped = BucketedDataParallel(parallel, bucket_mb=0.001)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (parallel, reference)]
    tokens, targets = torch.randint(13, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        positions = context.positions(32)
        loss = wrapped(context.piece(tokens), context.piece(targets), positions)
        expected = reference(tokens, targets)
        for module, value in ((wrapped, loss), (reference, expected)):
            module.zero_grad()
            value.backward()
        wrapped.synchronize_gradients()
        dist.all_reduce(loss := loss.detach() / context.ranks)
        torch.testing.assert_close(loss, expected.detach())
        for actual, whole in zip(parallel.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, whole.grad, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_ranks_equals_one_process(ranks):
    assert launch(on_ranks, None, ranks=ranks) == list(range(ranks))


@pytest.fixture
def sent(monkeypatch):
    """A number for each message that is sent by copies."""
    sent = []

    class Recorder:
        def exchange(self, x):
            sent.append(float(x.abs().sum()))
            return x.clone()

    monkeypatch.setattr(copied_all_to_all, "_outboxes_of", lambda *_: Recorder())
    return sent


def backward_by_copies(*, compiled=False, checkpointing="none"):
    """One step of a block, as one of two ranks whose messages go nowhere."""
    spec = dataclasses.replace(SPEC, num_layers=1, d_model=32, num_heads=8, num_kv_heads=8)
    with imagined_world(2):
        heads = HeadExchange(dist.group.WORLD, by_copies=True)
        model = TransformerLM(spec, seed=1)
        (block,) = model.blocks
        block.attention.attend = functools.partial(
            heads.attend, functools.partial(sdpa, is_causal=True)
        )
        model.through_blocks = through_blocks(checkpointing, 1, compiled_blocks=compiled)
        if compiled:
            block.compile(fullgraph=True)
        tokens = torch.arange(32).reshape(2, 16) % 13
        model(tokens, tokens, torch.arange(16)).backward()


def test_the_compiler_keeps_the_order_of_copied_exchanges(sent, monkeypatch, tmp_path):
    """It would move the second group's gradients behind the attention that they should hide."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backward_by_copies()
    eager = sent.copy()
    sent.clear()
    backward_by_copies(compiled=True)
    assert len(eager) == 8
    assert sent == pytest.approx(eager, rel=1e-4)


def test_heads_are_sent_once_under_selective_checkpointing(sent):
    for checkpointing, messages in (("none", 8), ("selective", 8), ("blocks", 12)):
        sent.clear()
        backward_by_copies(checkpointing=checkpointing)
        assert len(sent) == messages


@pytest.mark.gpu
def test_attention_over_gpus_equals_one_process():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    assert launch(on_gpus, None, ranks=2, device="cuda") == [0, 1]


def on_gpus(_):
    """Repeats attention while the ranks take turns at being late."""
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    heads = HeadExchange(dist.group.WORLD, by_copies=True)
    context = RingAttention(dist.group.WORLD, ATTENTION)
    for number in range(6):
        if context.rank == number % 2:
            torch.cuda._sleep(20_000_000)
        sizes = {"length": 512, "width": 64}
        compare_attention(context, number % 3 > 0, 2, torch.bfloat16, 4e-2, **sizes)
        compare_heads(heads, number % 3 > 0, 4, torch.bfloat16, 4e-2, **sizes)
    return context.rank
