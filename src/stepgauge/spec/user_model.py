"""A user's own network, named by the function that builds it, and the version of its source."""

import ast
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from stepgauge.spec.fields import option

# Fields whose values a user's model makes itself.
DECIDED = {
    "data": "brings its own batch",
    "checkpointing": "chooses its own",
    "balance": "is cut into stages by its FLOPs",
    "corpus": "brings its own batches",
    "evaluate_windows": "brings what is held out",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModelOption:
    """The option that takes the place of a preset and its shape."""

    model: str = option(
        "", "your own network as FILE.py:factory, which returns (module, batch); see docs/api.md"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModel:
    """A network that `factory` of `file` builds, with its batch.

    content  digest of the file and of what it imports beside it: another version is another row
    """

    file: str
    factory: str
    content: str
    # tells it from a ModelSpec in a record
    network: str = dataclasses.field(default="user", init=False)

    @classmethod
    def read(cls, where: str) -> Self:
        """Of "FILE.py:factory". Raises ValueError for other text, or a file that is not there."""
        file, _, factory = where.rpartition(":")
        path = Path(file)
        if not factory or path.suffix != ".py":
            raise ValueError(f"model is {where!r}; name it as FILE.py:factory")
        if not path.is_file():
            raise ValueError(f"model is {where!r}, but there is no file {path}")
        return cls(file=file, factory=factory, content=source_digest(path))


def source_digest(path: Path) -> str:
    """Of a Python file and of what it imports from its own folder, and so on."""
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
    except (SyntaxError, ValueError):  # importing it says what is wrong
        return
    for name in dict.fromkeys(_imported(tree)):
        neighbour = path.parent / name
        if neighbour.with_suffix(".py").is_file():
            yield from _sources(neighbour.with_suffix(".py"), seen)
        elif neighbour.is_dir():  # a package counts whole
            yield from sorted(neighbour.rglob("*.py"))


def _imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that the source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def settle_user_model(spec: Any) -> None:
    """Fills the fields that a user's model decides: its name for the size, one batch.

    Raises ValueError for an option that has no meaning then.
    """
    object.__setattr__(spec, "size", spec.model.factory)
    object.__setattr__(spec, "batch", 1)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in DECIDED and value != field.default:
            raise ValueError(f"{field.name} is {value!r}; a user's model {DECIDED[field.name]}")
    if spec.compile == "blocks":
        raise ValueError("compile is 'blocks'; of a user's model the blocks are not known: take on")
