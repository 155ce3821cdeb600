"""A user's own network: the function that builds it, and a digest of its source."""

import ast
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import option
from stepgauge.spec.model import ModelSpec

# Options that do not apply to a user's model, and the reason.
INAPPLICABLE = {
    "data": "brings its own batch",
    "checkpointing": "chooses its own",
    "balance": "is divided into stages by its FLOPs",
    "corpus": "brings its own batches",
    "evaluate_windows": "brings its own held-out batches",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModelOption:
    """The option that may be given instead of a preset and its shape."""

    model: str = option(
        "", "Your own network as FILE.py:factory, which returns (module, batch): see docs/api.md"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModel:
    """A network with its batch, built by the function `factory` of `file`.

    content  digest of the file and of its imports in the same folder: each version is a separate row
    """

    file: str
    factory: str
    content: str
    # Distinguishes it from a ModelSpec in a record.
    network: str = dataclasses.field(default="user", init=False)

    @classmethod
    def read(cls, where: str) -> Self:
        """Reads "FILE.py:factory". Raises ValueError for other text or a missing file."""
        file, _, factory = where.rpartition(":")
        path = Path(file)
        if not factory or path.suffix != ".py":
            raise ValueError(f"model is {where!r}; name it as FILE.py:factory")
        if not path.is_file():
            raise ValueError(f"model is {where!r}; there is no file {path}")
        return cls(file=file, factory=factory, content=source_digest(path))


def source_digest(path: Path) -> str:
    """Returns a digest of a Python file and, recursively, of its imports in the same folder."""
    digest = hashlib.sha256()
    for source in dict.fromkeys(_sources(path.resolve(), set())):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _sources(path: Path, seen: set[Path]) -> Iterator[Path]:
    if path in seen:
        return
    seen.add(path)
    yield path
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # reported when the file is imported
        return
    for name in dict.fromkeys(_imported(tree)):
        neighbour = path.parent / name
        if neighbour.with_suffix(".py").is_file():
            yield from _sources(neighbour.with_suffix(".py"), seen)
        elif neighbour.is_dir():  # of a package, all files count
            yield from sorted(neighbour.rglob("*.py"))


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yields the top-level names of the modules that the source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


class OfNetwork:
    """A step's spec: its field `model` is a network of known shape or a user's model."""

    model: ModelSpec | BertSpec | UserModel

    @property
    def network(self) -> ModelSpec | BertSpec:
        """The model, which must not be a user's, because its shape must be known."""
        assert not isinstance(self.model, UserModel)
        return self.model


def settle_user_model(spec: Any) -> None:
    """For a user's model, sets `size` to the factory's name and `batch` to 1.

    Raises ValueError for options that do not apply to a user's model. Changes no other spec.
    """
    if not isinstance(spec.model, UserModel):
        return
    object.__setattr__(spec, "size", spec.model.factory)
    object.__setattr__(spec, "batch", 1)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in INAPPLICABLE and value != field.default:
            raise ValueError(
                f"{field.name} is {value!r}; a user's model {INAPPLICABLE[field.name]}"
            )
    if spec.compile == "blocks":
        raise ValueError(
            "compile is 'blocks'; the blocks of a user's model are not known: choose on"
        )
