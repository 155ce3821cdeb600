"""The house stays as it was decided: functions on a screen, files in one sitting, and torch's private
parts in named files alone, each for one reason (CONTRIBUTING.md).
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/stepgauge"
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 40, 400
MOST_LONG_FUNCTIONS, LONGEST = 4, 45  # a few may be longer for a while; the aim is none
DEVICE_CODE = ("triton.jit", "gluon.jit")
# File -> what of torch's private parts it needs. Each says there what would make it unnecessary.
PRIVATE_TORCH = {
    "kernels/attention/operator.py": "an autograd formula without Python's layers of torch.library",
    "kernels/launch/__init__.py": "the handle of the current stream without an object around it",
    "kernels/plain_eager.py": "whether a dispatch mode or a transform is active",
    "measure/memory/autograd_engine.py": "the node that runs, and references of a storage",
    "parallel/reducer.py": "references of a storage",
    "parallel/shares.py": "a tensor's class without its __torch_function__",
}


def sources(*endings):
    return [path for path in sorted(SOURCE.rglob("*")) if path.suffix in endings]


def name(path):
    return path.relative_to(SOURCE).as_posix()


def functions(body):
    """Of a module and its classes; what stands in a function counts with it."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any(decorator.startswith(DEVICE_CODE) for decorator in decorators):
                yield node


def lines_of(path, function):
    """Of a command without its signature, which declares its options."""
    is_command = name(path).startswith("cli/")
    start = function.body[0].lineno if is_command else function.lineno
    return function.end_lineno - start + 1


def test_a_function_fits_a_screen():
    long = {
        f"{name(path)}: {node.name}": lines
        for path in sources(".py")
        for node in functions(ast.parse(path.read_text(encoding="utf-8")).body)
        if (lines := lines_of(path, node)) > MOST_LINES_OF_A_FUNCTION
    }
    assert len(long) <= MOST_LONG_FUNCTIONS, long
    assert {n: lines for n, lines in long.items() if lines > LONGEST} == {}


def test_a_file_is_read_in_one_sitting():
    lengths = {
        name(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(".py", ".cpp", ".h", ".js")
    }
    assert {n: lines for n, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_every_file_that_is_no_module_is_packaged():
    """Else what is installed from a wheel misses it."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = {
        name(path)
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (SOURCE.parent / package.replace(".", "/")).glob(pattern)
    }
    others = {
        name(path)
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert packaged == others


def test_private_torch_stays_where_it_is_explained():
    used = {
        name(path)
        for path in sources(".py")
        if re.search(r"\btorch\._C\b", path.read_text("utf-8"))
    }
    assert used == set(PRIVATE_TORCH)


@pytest.mark.parametrize("path", sorted(PRIVATE_TORCH))
def test_private_torch_names_its_way_out(path):
    assert "way out" in (SOURCE / path).read_text(encoding="utf-8")
