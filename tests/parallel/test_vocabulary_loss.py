"""The loss over parts of the vocabulary, on one rank that has all of it or one part."""

import pytest
import torch
import torch.nn.functional as F

from stepgauge.parallel.tensor_parallel import vocabulary_loss


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
        lambda leaf: vocabulary_loss._CrossEntropy.apply(leaf, targets, 0, None, True), logits
    )
    assert torch.equal(gradient[1], torch.zeros(5))
    assert gradient[[0, 2]].isfinite().all()
