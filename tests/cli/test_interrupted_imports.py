"""Ctrl-C and SIGTERM while torch is imported end the command."""

import os
import signal
import subprocess
import sys

import pytest

# The signal arrives when numpy imports a part of itself. torch's C code imports numpy, and drops errors.
PROGRAM = """
import importlib.abc, os, signal, sys

class Sender(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy.linalg":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(os.environ["SENT"]))

if __name__ == "__main__":
    sys.meta_path.insert(0, Sender())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    from stepgauge.__main__ import main
    main()
"""


@pytest.mark.parametrize(
    ("sent", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupt_while_torch_is_imported_ends_the_command(tmp_path, sent, status, word):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["bench", "comm", "--device", "cpu", "--ranks", "2", "--size", "4K"]
    run = subprocess.run(
        [sys.executable, "program.py", *command, "--out", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SENT": str(int(sent))},
        capture_output=True,
        text=True,
    )
    # CPython may end a process whose KeyboardInterrupt has left an exec() with the signal itself
    assert run.returncode in (status, -sent), run.stderr
    assert (run.stdout, run.stderr) == ("", f"stepgauge: {word}\n")
