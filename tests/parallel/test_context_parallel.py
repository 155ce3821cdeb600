"""Ring attention and exchanged heads on 1, 2 and 4 ranks against attention in one process, and a whole step with it."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist

from stepgauge.kernels.attention import attention
from stepgauge.kernels.attention.partial import partial_backward, partial_forward
from stepgauge.models.parts import sdpa
from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.context_parallel.head_exchange import HeadExchange
from stepgauge.parallel.context_parallel.ring_attention import PartialAttention, RingAttention
from stepgauge.parallel.data_parallel import BucketedDataParallel
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
def test_every_pair_of_tokens_meets_once(ranks):
    length = 4 * ranks
    for is_causal in (True, False):
        met = torch.zeros(length, length, dtype=torch.int64)
        for rank in range(ranks):
            for meeting in plan_ring(rank, ranks, is_causal=is_causal):
                queries = ring_positions(length, rank, ranks)[chunk_slice(meeting.queries, 4)]
                keys = ring_positions(length, meeting.source, ranks)[chunk_slice(meeting.keys, 4)]
                for i, query in enumerate(queries):
                    for j, key in enumerate(keys):
                        met[query, key] += i >= j or not meeting.is_causal
        expected = torch.ones_like(met)
        assert torch.equal(met, expected.tril() if is_causal else expected)


def on_ranks(_):
    context = RingAttention(dist.group.WORLD, ATTENTION)
    for is_causal in (True, False):
        for kv_heads in (4, 2, 1):
            compare_attention(context, is_causal, kv_heads, torch.float64, 1e-12)
    compare_attention(context, True, 4, torch.bfloat16, 2e-2)
    context.communicates = False
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    context.attend(q, q, q).sum().backward()  # nobody is waited for
    context.communicates = True
    heads = HeadExchange(dist.group.WORLD)
    for is_causal in (True, False):
        for kv_heads in (4, 8):
            compare_heads(heads, is_causal, kv_heads, torch.float64, 1e-12)
    compare_heads(heads, True, 4, torch.bfloat16, 2e-2)
    compare_penalty(heads)
    heads.communicates = False
    compare_heads_alone(heads)
    heads.communicates = True
    with pytest.raises(ValueError, match=f"3 heads of keys, which {heads.ranks} ranks do not"):
        heads.attend(sdpa, *(torch.ones(1, 3, 8, 4) for _ in range(3)))
    for positions in ("rope", "learned"):
        compare_step(context, positions)
    with pytest.raises(ValueError, match="33 tokens; context parallel over"):
        context.piece(torch.zeros(1, 33))
    refuse()
    return context.rank


def compare_heads(context, is_causal, kv_heads, dtype, tolerance, **sizes):
    """By torch's own attention, which knows nothing of ranks."""

    def attend(*qkv, is_causal):
        return context.attend(functools.partial(sdpa, is_causal=is_causal), *qkv)

    compare_attention(
        context, is_causal, kv_heads, dtype, tolerance, attend=attend, heads=8, **sizes
    )


def compare_penalty(context):
    """Gradients of a loss that has in it the gradients of an attention's output, times constants."""

    def plain(q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    def backward(attend, qkv, factor):
        loss = (attend(*qkv) * factor).sum()
        gradients = torch.autograd.grad(loss, qkv, create_graph=True)
        (loss + sum(each.square().sum() for each in gradients)).backward()

    torch.manual_seed(0)
    *wholes, factor = (torch.randn(2, 8, 16, 4, dtype=torch.float64) for _ in range(4))
    pieces = [context.piece(x, dim=2).requires_grad_() for x in wholes]
    wholes = [x.requires_grad_() for x in wholes]
    backward(plain, wholes, factor)
    backward(functools.partial(context.attend, plain), pieces, context.piece(factor, dim=2))
    for piece, expected in zip(pieces, wholes, strict=True):
        torch.testing.assert_close(context.whole(piece.grad, dim=2), expected.grad)


def compare_heads_alone(context):
    """Without communication: results are wrong, of the right shape, and nobody is waited for."""
    q = torch.randn(1, 4, 8, 8, requires_grad=True)
    o = context.attend(sdpa, q, q, q)
    o.sum().backward()
    assert o.shape == q.shape == q.grad.shape


def refuse():
    """What cannot be computed raises before or after keys were sent, and the ranks can go on."""
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
    wanted = [expected.detach(), *(x.grad for x in wholes)]
    for found, want in zip((o.detach(), *(x.grad for x in pieces)), wanted, strict=True):
        assert found.dtype == dtype
        whole = context.whole(found, dim=2).double()
        torch.testing.assert_close(whole, want, rtol=tolerance, atol=tolerance)


def compare_step(context, positions):
    """Two steps of SGD on the rank's tokens, weights kept equal as data parallel does."""
    spec = dataclasses.replace(SPEC, positions=positions)
    alone = TransformerLM(spec, seed=1).double()
    spread = copy.deepcopy(alone)
    for block in spread.blocks:
        block.attention.attend = functools.partial(context.attend, is_causal=True)
    wrapped = BucketedDataParallel(spread, bucket_mb=0.001)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (spread, alone))
    tokens, targets = torch.randint(13, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        where = context.positions(32)
        loss = wrapped(context.piece(tokens), context.piece(targets), where)
        expected = alone(tokens, targets)
        for module, value in ((wrapped, loss), (alone, expected)):
            module.zero_grad()
            value.backward()
        wrapped.synchronize_gradients()
        dist.all_reduce(loss := loss.detach() / context.ranks)
        torch.testing.assert_close(loss, expected.detach())
        for mine, whole in zip(spread.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-10, atol=1e-12)
        ours.step()
        theirs.step()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_equals_one_process(ranks):
    assert launch(on_ranks, None, ranks=ranks) == list(range(ranks))


@pytest.mark.gpu
def test_a_ring_equals_one_process_on_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    assert launch(on_gpus, None, ranks=2, device="cuda") == [0, 1]


def on_gpus(_):
    """Attention again and again, while one rank or the other comes late."""
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    heads = HeadExchange(dist.group.WORLD)
    context = RingAttention(dist.group.WORLD, ATTENTION)
    for number in range(6):
        if context.rank == number % 2:
            torch.cuda._sleep(20_000_000)
        sizes = {"length": 512, "width": 64}
        compare_attention(context, number % 3 > 0, 2, torch.bfloat16, 4e-2, **sizes)
        compare_heads(heads, number % 3 > 0, 4, torch.bfloat16, 4e-2, **sizes)
    return context.rank
