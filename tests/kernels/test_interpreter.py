"""The tests of this folder whose names begin with test_interp_, in Triton's interpreter: in one
process of their own, since the choice is made when Triton is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.triton_here import compiled_only, needs_triton

FILES = [
    path for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if "\ndef test_interp_" in path.read_text()
]  # fmt: skip


@needs_triton
@compiled_only
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter():
    alone = ["-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *alone, *map(str, FILES), "-k", "interp_"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert passed >= 70 and "skipped" not in result.stdout.splitlines()[-1], result.stdout
