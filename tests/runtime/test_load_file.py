"""Importing a user's Python file."""

import dataclasses
import json
import pickle
import sys

import pytest

from stepgauge.runtime.load_file import load_file


def test_a_file_may_import_from_its_folder_and_leaves_sys_unchanged(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("answer = 42")
    (tmp_path / "json.py").write_text(
        "import dataclasses\nfrom neighbour_of_mine import answer\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = answer\n"
    )
    before = [*sys.path]
    module = load_file(tmp_path / "json.py")
    assert sys.path == before
    assert sys.modules["json"] is json
    assert dataclasses.asdict(pickle.loads(pickle.dumps(module.Point()))) == {"x": 42}


def test_a_file_that_fails_is_reported_and_leaves_no_module(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    before, known = [*sys.path], set(sys.modules)
    with pytest.raises(
        ValueError,
        match=r"broken\.py cannot be imported: line 1: ZeroDivisionError: division by zero",
    ):
        load_file(tmp_path / "broken.py")
    assert sys.path == before
    assert set(sys.modules) == known
