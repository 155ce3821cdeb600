import pytest
import torch

from stepgauge.train.data import Corpus, CorpusError, Text, random_batch, read_text


def test_the_default_corpus_is_the_standard_library():
    text = read_text("stdlib")
    assert len(text.data) > 5_000_000
    assert b"def namedtuple" in text.data
    assert len(text.sha256) == 64


def test_bytes_are_tokens_and_the_end_is_held_out():
    data = b"".join(b"line %d\n" % i for i in range(1000))
    corpus = Corpus.of(Text("t", data))
    assert bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist()) == data
    assert corpus.train[-1] == ord("\n")
    assert 0.04 < corpus.held_out.numel() / len(data) < 0.06


def test_a_batch_is_a_function_of_seed_and_step():
    corpus = Corpus.of(Text("t", bytes(range(1, 200)) * 100))
    first = corpus.batch(3, batch=4, length=16, seed=1)
    again = corpus.batch(3, batch=4, length=16, seed=1)
    other = corpus.batch(4, batch=4, length=16, seed=1)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])  # targets are one position later


def test_held_out_windows_do_not_overlap():
    corpus = Corpus.of(Text("t", b"ab\n" * 10_000))
    tokens, targets = corpus.held_out_windows(1000, 100)
    assert tokens.shape == targets.shape == (14, 100)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"abc\0def", "is binary"),
        (b"\xff\xfe\xfa", "is binary"),
    ],
)
def test_an_unusable_corpus_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=words) as error:
        read_text(str(path))
    assert str(path) in str(error.value)


def test_a_folder_gives_its_text_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    assert read_text(str(tmp_path)).data == b"first\nsecond"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CorpusError, match="holds no text file"):
        read_text(str(empty))


@pytest.mark.parametrize("data", [b"just a few words\n", b"x"])
def test_a_corpus_shorter_than_a_sequence_is_refused(data):
    corpus = Corpus.of(Text("short.txt", data))
    with pytest.raises(
        CorpusError, match=r"short.txt is too short: its training part has \d+ tokens"
    ):
        corpus.require(length=64)


def test_random_batches_depend_only_on_the_seed():
    first, again, other = (random_batch(50, 2, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert first[0].max() < 50
