"""The loss over parts of the vocabulary, on one rank with all of it or one part, and compiled on two."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from stepgauge.parallel.tensor_parallel import vocabulary_loss
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.runtime.launch import launch


def loss_and_gradient(loss_of, logits):
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("copied", [1, 22, 2**26])  # logits at a time: a token's, two tokens', all
def test_the_loss_of_all_words_is_that_of_torch(monkeypatch, copied):
    monkeypatch.setattr(vocabulary_loss, "MOST_COPIED_LOGITS", copied)
    torch.manual_seed(0)
    logits = 10 * torch.randn(7, 11, dtype=torch.float64)
    targets = torch.tensor([0, 10, -100, 3, 3, 5, 7])

    def ours(leaf):
        return vocabulary_loss._CrossEntropy.apply(leaf, targets, 0, None)

    found = loss_and_gradient(ours, logits)
    expected = loss_and_gradient(lambda leaf: F.cross_entropy(leaf, targets), logits)
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-15)


def test_tokens_whose_words_are_all_ruled_out_on_this_rank_have_no_gradient():
    """The other ranks have their sums. Here there is none, so the loss of these tokens is infinite."""
    logits = torch.randn(3, 5)
    logits[1] = -torch.inf
    targets = torch.tensor([2, 9, 4])  # 9 is another rank's word
    _, gradient = loss_and_gradient(
        lambda leaf: vocabulary_loss._CrossEntropy.apply(leaf, targets, 0, None), logits
    )
    assert torch.equal(gradient[1], torch.zeros(5))
    assert gradient[[0, 2]].isfinite().all()


def compiled_difference():
    """Returns the largest difference of this rank's gradient from that of torch's loss, compiled by
    inductor, which sums a stacked tensor over ranks in the memory of its parts.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 10, dtype=torch.float64), torch.randint(10, (6,))
    _, expected = loss_and_gradient(lambda leaf: F.cross_entropy(leaf, targets), logits)
    own = slice(5 * rank, 5 * rank + 5)

    @torch.compile
    def ours(leaf):
        return vocabulary_loss.vocabulary_parallel_cross_entropy(
            leaf,
            targets,
            first_row=own.start,
            vocab_size=10,
            stream=ResidualStream(dist.group.WORLD),
        )

    _, gradient = loss_and_gradient(ours, logits[:, own])
    return (gradient - expected[:, own]).abs().max().item()


def test_a_compiled_loss_has_the_same_gradient_on_each_of_two_ranks():
    assert max(launch(compiled_difference, ranks=2, device="cpu")) < 1e-12
