"""C++ built where it runs: once, by one process."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from stepgauge.runtime.build import RETRY_AFTER_S, BuildError, shared_library

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
    """A compiler that says each time that it runs; `compiler(body)` is what it does."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    log.touch()

    def behaves(body):
        script.write_text(f"#!/bin/sh\necho run >> {log}\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return lambda: len(log.read_text().splitlines())

    return behaves


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "double.cpp"
    path.write_text(SOURCE)
    return path


def test_two_processes_compile_once(source, compiler, tmp_path):
    runs = compiler(f'sleep 0.3; exec {COMPILER} "$@"')
    code = (
        "import sys; from pathlib import Path; from stepgauge.runtime.build import shared_library; "
        "print(shared_library(Path(sys.argv[1]), name='it'))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, source], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=100)[0] for process in started}
    assert len(printed) == 1 and Path(printed.pop().decode().strip()).exists()
    assert runs() == 1
    # nothing else is left
    assert [path.suffix for path in (tmp_path / "cache/stepgauge").iterdir()] == [".so"]


def test_a_failed_build_is_not_tried_again_for_an_hour(source, compiler, tmp_path):
    runs = compiler("echo no such standard >&2; exit 1")
    for _ in range(3):
        with pytest.raises(BuildError, match="no such standard"):
            shared_library(source, name="it")
    assert runs() == 2  # one for each standard
    (note,) = (tmp_path / "cache/stepgauge").iterdir()
    os.utime(note, times=(time.time() - RETRY_AFTER_S - 1,) * 2)
    with pytest.raises(BuildError):
        shared_library(source, name="it")
    assert runs() == 4


def test_another_source_is_another_library(source, capfd):
    libraries = []
    for text in ("// one\n", "// another\n"):
        source.write_text(text)
        libraries.append(shared_library(source, name="it"))
    assert libraries[0] != libraries[1] and all(path.exists() for path in libraries)
    assert capfd.readouterr().err == ""


def test_no_compiler_is_said(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: there is no no-such-compiler"):
        shared_library(source, name="it")
