"""Without communication a rank computes with its own rows in place of the others', to time everything else.

Zeros would draw less power and let a GPU at its power limit run faster; and zeros behind a norm have
gradients that grow from layer to layer.
"""

import dataclasses

import pytest
import torch
from torch import nn

from stepgauge.parallel.tensor_parallel.layers import VocabularyParallelEmbedding
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream


class SecondOfTwo:
    """Stands in for a process group, which nothing may use to communicate."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


STREAM = ResidualStream(SecondOfTwo(), communicates=False)  # type: ignore[arg-type]
CUTS = pytest.mark.parametrize("by_token", [False, True])


@CUTS
def test_own_rows_are_gathered_and_their_gradient_is_this_ranks_piece(by_token):
    x = torch.randn(1, 3, 4, requires_grad=True)
    whole = dataclasses.replace(STREAM, by_token=by_token).gather_input(x)
    assert torch.equal(whole, torch.cat([x, x], 1))
    upstream = torch.randn(1, 6, 4)
    whole.backward(upstream)
    assert torch.equal(x.grad, upstream[:, 3:])


@CUTS
@pytest.mark.parametrize("piece_of", [ResidualStream.reduce_output, ResidualStream.split])
def test_own_rows_are_kept_and_their_gradient_fills_all_rows(by_token, piece_of):
    y = torch.randn(1, 6, 4, requires_grad=True)
    piece = piece_of(dataclasses.replace(STREAM, by_token=by_token), y)
    assert torch.equal(piece, y[:, 3:])
    upstream = torch.randn(1, 3, 4)
    piece.backward(upstream)
    assert torch.equal(y.grad, torch.cat([upstream, upstream], 1))


def test_tokens_of_other_ranks_have_embeddings_of_this_rank():
    layer = nn.Embedding(4, 8)
    embedding = VocabularyParallelEmbedding(layer, STREAM, first_row=4, vocab_size=8)
    tokens = torch.arange(8)[None]
    found = embedding(tokens)[0]
    assert torch.equal(found, layer.weight[tokens[0] % 4])
