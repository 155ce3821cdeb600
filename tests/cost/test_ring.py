"""Context-parallel ranks send what the cost model predicts, during the predicted attention."""

import types

import pytest
import torch

from stepgauge.cost.operations.ring_attention import Ring
from stepgauge.cost.operations.terms import Term
from stepgauge.parallel.context_parallel import ring_transport
from stepgauge.parallel.context_parallel.ring_attention import PartialAttention, RingAttention

HEADS, TOKENS, WIDTH = 6, 4, 8


class Wire:
    """Records the bytes of each message, and the query heads computed before it was waited for."""

    def __init__(self):
        self.messages = []

    def arriving(self, tensor, group):
        message = [tensor.nbytes, 0]
        self.messages.append([message, True])

        def wait():
            self.messages[place][1] = False
            return tensor.clone()

        place = len(self.messages) - 1
        return types.SimpleNamespace(wait=wait)

    def met(self, q):
        for message, travels in self.messages:
            message[1] += q.shape[1] * travels

    def taken(self):
        found, self.messages = [tuple(message) for message, _ in self.messages], []
        return found


class Group:
    def __init__(self, ranks):
        self.rank, self.size = (lambda: 1), (lambda: ranks)


def predicted(terms):
    return [(t.sizes[0], sum(b.sizes[0] for b in t.hidden_by if b.name == "attention"))
            for t in terms if t.axis]  # fmt: skip


@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 2), (2, 1), (3, 3), (4, 6)])
def test_messages_and_the_attention_that_hides_them(ranks, key_heads, monkeypatch):
    wire = Wire()
    monkeypatch.setattr(ring_transport, "_Shift", wire.arriving)

    def forward(q, k, v, is_causal, scale):
        wire.met(q)
        return q.clone(), torch.zeros(q.shape[:-1])

    def backward(grad_o, q, k, v, o, lse, is_causal, scale):
        wire.met(q)
        return q, k, v

    group = Group(ranks)
    context = RingAttention(group, PartialAttention(forward, backward))
    q, k, v = (
        torch.ones(1, heads, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, key_heads, key_heads)
    )
    values = k.numel() + v.numel()
    ring = Ring(ranks, q.numel(), values, q.itemsize, key_heads)
    whole = Term("attention", "attention triton backward bf16", (HEADS, TOKENS, WIDTH))
    o = context.attend(q, k, v)
    assert wire.taken() == predicted(ring.forward(whole))
    o.sum().backward()
    assert wire.taken() == predicted(ring.backward(whole))


def test_two_ranks_sum_in_the_dtype_of_keys():
    names = [t.name for t in Ring(2, 1.0, 1.0, 2, 1).forward(Term("attention", "a", (1, 1, 1)))]
    assert not {"attention.ring.cast_to_fp32", "attention.ring.cast_result"} & {*names}
