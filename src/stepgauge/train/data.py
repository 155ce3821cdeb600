"""Makes batches of text. A batch is a pure function of the corpus, the seed and the step, so that
resuming a run needs no state of the data.

Legend: B batch, T sequence.
"""

import dataclasses
import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from stepgauge.models.bert import NOT_MASKED
from stepgauge.spec.train import DEFAULT_CORPUS

HELD_OUT_FRACTION = 0.05  # the last part of the corpus
MASKED_SHARE = 0.15
MASK_TOKEN = 103  # [MASK] in the published vocabulary
DEFAULT_EXCLUDED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__")


class CorpusError(ValueError):
    """A corpus that cannot be trained on; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Text:
    """The bytes of a corpus, with its name and its hash."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def train_length(self) -> int:
        """Bytes of the training part, which ends with a line so that no character is split."""
        wanted = int(len(self.data) * (1 - HELD_OUT_FRACTION))
        return self.data.rfind(b"\n", 0, wanted) + 1 or wanted


@functools.cache
def read_text(corpus: str) -> Text:
    """Returns the text of a file, of all text files in a folder sorted by path, or of the default
    corpus, which is Python's standard library.

    Raises CorpusError if it is missing, empty or not text.
    """
    if corpus == DEFAULT_CORPUS:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [
            path
            for path in sorted(root.rglob("*.py"))
            if not set(path.relative_to(root).parts) & set(DEFAULT_EXCLUDED)
        ]
        return Text(DEFAULT_CORPUS, b"\n".join(path.read_bytes() for path in paths))
    path = Path(corpus)
    if not path.exists():
        raise CorpusError(f"corpus {corpus} does not exist")
    try:
        data = path.read_bytes() if path.is_file() else _read_folder(path)
    except OSError as error:
        raise CorpusError(f"corpus {corpus} cannot be read: {error.strerror}") from None
    if not data.strip():
        raise CorpusError(f"corpus {corpus} is empty")
    if not _is_text(data):
        raise CorpusError(f"corpus {corpus} is binary; it must be text")
    return Text(corpus, data)


def _read_folder(folder: Path) -> bytes:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    texts = list(filter(_is_text, (path.read_bytes() for path in files)))
    if not texts:
        raise CorpusError(f"corpus {folder} holds no text file")
    return b"\n".join(texts)


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes of a text as tokens, split into a training part and a held-out part."""

    text: Text
    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: Text) -> "Corpus":
        """Returns the corpus of a text, with its bytes as tokens."""
        tokens = torch.frombuffer(bytearray(text.data), dtype=torch.uint8)
        return cls(text, tokens[: text.train_length], tokens[text.train_length :])

    def require(self, *, length: int) -> None:
        """Raises CorpusError unless both parts have at least one sequence of that length with its
        targets.
        """
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if part.numel() <= length:
                raise CorpusError(
                    f"corpus {self.text.name} is too short: its {name} part has {part.numel():,} tokens, "
                    f"and a sequence of {length:,} needs {length + 1:,}"
                )

    def batch(self, step: int, *, batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns tokens_BT and targets_BT of a step: windows at random positions of the training
        part.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        starts = torch.randint(self.train.numel() - length, (batch,), generator=generator)
        return windows(self.train, starts, length)

    def held_out_windows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns tokens_BT and targets_BT of at most `count` windows of the held-out part, always
        the same ones: evenly spaced and without overlap.
        """
        fit = (self.held_out.numel() - 1) // length
        chosen = min(count, fit)
        starts = torch.arange(chosen) * (fit // chosen) * length
        return windows(self.held_out, starts, length)


def windows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns tokens_BT from each start, and targets_BT, which are the tokens one position later."""
    index = starts[:, None] + torch.arange(length + 1)
    window = tokens[index].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def random_batch(vocab_size: int, batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns tokens_BT and targets_BT of independent uniform tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def masked_batch(
    vocab_size: int, batch: int, length: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens_BT, targets_BT and types_BT of pairs of independent uniform texts, masked as for
    BERT (Devlin et al. 2019).

    15 % of the tokens have a target. Of these, 80 % are replaced by [MASK], 10 % by another token,
    and 10 % are unchanged.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator)
    draw = torch.rand((batch, length), generator=generator)  # decides each token's treatment
    # A row without any target would have no loss.
    draw[:, 0] = torch.where((draw < MASKED_SHARE).any(1), draw[:, 0], 0.0)
    targets = tokens.where(draw < MASKED_SHARE, NOT_MASKED)
    others = torch.randint(vocab_size, (batch, length), generator=generator)
    tokens = torch.where(draw < 0.9 * MASKED_SHARE, others, tokens)
    tokens = tokens.masked_fill(draw < 0.8 * MASKED_SHARE, min(MASK_TOKEN, vocab_size - 1))
    types = (torch.arange(length) >= length // 2).long().expand(batch, -1).contiguous()
    return tokens, targets, types
