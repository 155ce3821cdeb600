"""Building C++ libraries: once per source, with clear errors."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from stepgauge.runtime.build import BuildError, shared_library

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not COMPILER or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C++ compiler and Python.h",
)
SOURCE = "int twice(int x) { return 2 * x; }\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(body) sets CXX to a script that runs `body`, and returns a function that counts its runs."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    log.touch()

    def use(body):
        script.write_text(f"#!/bin/sh\necho run >> {log}\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return lambda: len(log.read_text().splitlines())

    return use


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "double.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_is_compiled_once_and_leaves_no_other_files(source, compiler, tmp_path):
    runs = compiler(f'exec {COMPILER} "$@"')
    assert shared_library(source, name="it") == shared_library(source, name="it")
    assert runs() == 1
    assert [path.suffix for path in (tmp_path / "cache/stepgauge").iterdir()] == [".so"]


def test_a_failed_build_is_reported_and_leaves_no_files(source, compiler, tmp_path):
    runs = compiler("echo no such standard >&2; exit 1")
    with pytest.raises(BuildError, match="no such standard"):
        shared_library(source, name="it")
    assert runs() == 2  # one per standard
    assert not [*(tmp_path / "cache/stepgauge").iterdir()]


def test_a_changed_source_gives_another_library(source, capfd):
    libraries = []
    for text in ("// one\n", "// another\n"):
        source.write_text(text)
        libraries.append(shared_library(source, name="it"))
    assert libraries[0] != libraries[1] and all(path.exists() for path in libraries)
    assert capfd.readouterr().err == ""


def test_a_missing_compiler_is_reported(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: there is no no-such-compiler"):
        shared_library(source, name="it")
