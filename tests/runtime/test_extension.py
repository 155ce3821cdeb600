"""C++ built where it runs: once, by one process, before anything is measured, and told apart."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from stepgauge.runtime import extension as native
from stepgauge.runtime.build import RETRY_AFTER_S, BuildError, shared_library
from stepgauge.runtime.extension import Extension

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not COMPILER or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C++ compiler and Python.h",
)
SOURCE = """
#include "module.h"

PyObject* serve(PyObject* const* args, Py_ssize_t count) {  // takes numbers, leaves the rest to Python
  if (count != 1 || !PyLong_Check(args[0])) Py_RETURN_NONE;
  return PyLong_FromLong(2 * PyLong_AsLong(args[0]));
}

PyMethodDef methods[] = {
    serving<serve>("double"), {"calls", py_calls, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyMODINIT_FUNC PyInit_stepgauge_double() {
  return module_of("stepgauge_double", methods);
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_extensions", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


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


class Doubled:
    """An operation with a path in C++, in the manner of those in kernels/."""

    def __init__(self, source):
        self.extension = Extension("double", source, lambda module: None)
        self.in_python = 0

    def __call__(self, x=21):
        if self.extension.call is not None:
            result = self.extension.call(x)
            if result is not None:
                return result
        self.in_python += 1
        if self.extension.module is None:
            self.extension.without_module += 1
        return 2 * x


def test_two_processes_compile_once(source, compiler, tmp_path):
    runs = compiler(f'sleep 0.3; exec {COMPILER} "$@"')
    code = (
        "import sys; from pathlib import Path; from stepgauge.runtime.build import shared_library; "
        "from stepgauge.runtime.extension import MODULE_H; "
        "print(shared_library(Path(sys.argv[1]), name='it', headers=[MODULE_H]))"
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


def test_another_source_or_header_is_another_library(source, tmp_path):
    header = tmp_path / "own.h"
    source.write_text('#include "own.h"\n')
    libraries = []
    for text in ("// one\n", "// another\n"):
        header.write_text(text)
        libraries.append(shared_library(source, name="it", headers=[header]))
    assert libraries[0] != libraries[1] and all(path.exists() for path in libraries)


def test_a_quiet_build_says_nothing(source, compiler, capfd):
    compiler(f'exec {COMPILER} "$@"')
    source.write_text("// nothing\n")
    assert shared_library(source, name="quiet", is_quiet=True).exists()
    assert capfd.readouterr().err == ""


def test_no_compiler_is_said(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: there is no no-such-compiler"):
        shared_library(source, name="it")


def test_prepare_builds_before_the_first_call_and_says_so(source, compiler, capfd):
    runs = compiler(f'exec {COMPILER} "$@"')
    doubled = Doubled(source)
    assert native.prepare() and runs() == 1
    assert [doubled(), doubled()] == [42, 42] and doubled.in_python == 0
    assert native.served() == {"double": "C++"}
    assert native.prepare() and runs() == 1 and native.served() == {}
    said = capfd.readouterr().err
    assert said.count("stepgauge: compiling stepgauge_double-") == said.count("\n") == 1


def test_nothing_is_built_unasked_or_for_another_device(source, compiler, monkeypatch):
    runs = compiler(f'exec {COMPILER} "$@"')
    doubled = Doubled(source)
    assert not native.prepare("cpu") and native.served() == {}
    assert doubled() == 42
    assert native.served() == {"double": "Python: stepgauge.kernels.prepare() was not called"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not native.prepare() and not runs()


def test_calls_left_to_python_are_told_apart(source):
    doubled = Doubled(source)
    assert native.prepare() and native.served() == {}
    assert [doubled(), doubled(1.5)] == [42, 3.0]
    assert native.served() == {"double": "C++, 1 of 2 calls"}
    doubled.extension.kinds += 1  # Python served the call in order to tell C++ how
    assert native.served() == {"double": "C++"}
    native.prepare()
    doubled(1.5)
    assert native.served() == {"double": "Python: C++ does not take such calls"}


@pytest.mark.parametrize(
    "variable, value, reason",
    [
        ("CXX", "false", "BuildError: .*false failed"),
        ("STEPGAUGE_EXTENSION", "0", "STEPGAUGE_EXTENSION=0"),
    ],
)
def test_without_it_python_serves_and_says_why(source, monkeypatch, variable, value, reason):
    monkeypatch.setenv(variable, value)
    doubled = Doubled(source)
    assert not native.prepare()
    assert [doubled() for _ in range(3)] == [42] * 3 and doubled.in_python == 3
    assert native.served()["double"] == f"Python: {doubled.extension.problem}"
    assert re.search(reason, doubled.extension.problem)


def test_a_failed_load_is_not_repeated(source, compiler):
    runs = compiler("exit 1")
    doubled = Doubled(source)
    assert [doubled.extension.load() for _ in range(3)] == [False] * 3
    assert runs() == 2
