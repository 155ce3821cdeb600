"""Reads lists of steps and layouts to validate."""

from pathlib import Path

import pytest

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.step import StepSpec
from stepgauge.validate.predicted import predicted
from stepgauge.validate.rows import default_rows, read_list, specs_of

REPOSITORY = Path(__file__).parents[2]
LIST = """
[usual]
device = "cpu"
context_length = 64

[[rows]]
size = ["nano", "tiny"]
layout = ["none", "dp2 zero1"]
batch = 8

[[rows]]
size = "tiny"
layout = "tp2"
context = 64
batch = 4
expect = "products are narrower than any that was calibrated"
"""


def test_a_list_of_values_makes_a_row_for_each(tmp_path):
    path = tmp_path / "rows.toml"
    path.write_text(LIST)
    rows = read_list(path, {})
    assert [type(row.spec) for row in rows] == [StepSpec] * 2 + [DataParallelSpec] * 2 + [
        LayoutSpec
    ]
    shared = rows[2].spec
    assert (shared.batch, shared.ranks, shared.wrapper, shared.size) == (4, 2, "zero1", "nano")
    assert {row.spec.model.context_length for row in rows} == {64}
    assert rows[4].spec.layout == "tp2" and rows[4].expect.startswith("products")
    assert {row.spec.precision for row in read_list(path, {"precision": ("bf16",)})} == {"bf16"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows", "cannot read the list"),
        ("[[row]]\nsize='nano'", "has 'row'; a list has"),
        ("[usual]\nsize='nano'", "has no \\[\\[rows\\]\\]"),
        ("rows = 3", "has rows that are not tables: write each under \\[\\[rows\\]\\]"),
        ("rows = [3]", "has rows that are not tables: write each under \\[\\[rows\\]\\]"),
        ("usual = 3\n[[rows]]\nsize='nano'", "has usual, but not as a table: write \\[usual\\]"),
        ("[[rows]]\nsize='nano'\n[[rows]]\nsize='nano'\nbatch=[]", "batch has no value"),
        ("[[rows]]\nsize='nano'\n[[rows]]\nsize='nano'\nlayout=[]", "layout has no value"),
        ("[[rows]]\nsize='nano'\nsise=3", "row 1 of .*: a row has no 'sise'; did you mean 'size'"),
        (
            "[[rows]]\nsize='nano'\n[[rows]]\nzzz=3",
            "row 2 of .*: a row has no 'zzz'; it may have layout, .* context, d-model",
        ),
        ("[[rows]]\nsize='nano'\n'--context'=3", "no '--context'; did you mean 'context'"),
        ("[[rows]]\nbatch=3", "row 1 of .*: the network is missing: give 'size' "),
        ("[[rows]]\nsize='nano'\nbatch='x'", "batch is 'x'; it must be a whole number"),
        ("[[rows]]\nsize='nano'\nlayout='dp2'\nbatch=3", "which 2 data ranks do not divide"),
        ("[[rows]]\nsize='nano'\nlayout='dp2'\ndata='text'", "data is no option of a step over 2"),
        ("[[rows]]\nsize='nano'\ncuda_graphs=true", "cuda_graphs needs our tensor axis or a"),
        ("[[rows]]\nsize='vast'", "size is 'vast'"),
    ],
)
def test_an_invalid_list_is_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "rows.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_list(path, {})


def test_layouts_without_a_batch_do_the_same_step():
    specs = specs_of({"size": ("nano",)}, ["none", "dp2 bucketed", "tp2", "pp2 1f1b m4"])
    assert [spec.batch * spec.parsed_layout.data for spec in specs[:2]] == [StepSpec.batch] * 2
    assert [spec.batch for spec in specs[2:]] == [StepSpec.batch] * 2
    network = f"{REPOSITORY}/examples/lstm.py:lstm"
    (eight,) = specs_of({"model": (network,)}, ["dp8 bucketed"])  # it brings a batch per rank
    assert (eight.ranks, eight.batch) == (8, 1)


def test_default_rows_cover_one_process_and_all_gpus():
    cpu, one, four = default_rows(0), default_rows(1), default_rows(4)
    assert {getattr(row.spec, "ranks", 1) for row in cpu} == {1, 2}
    assert {type(row.spec) for row in one} == {StepSpec}
    assert max(row.spec.ranks for row in four if isinstance(row.spec, DataParallelSpec)) == 4


def test_the_lists_of_the_gpu_campaigns_can_be_read_and_predicted():
    folder = REPOSITORY / "benchmarks" / "validation"
    machine = HardwareFile.read(REPOSITORY / "hardware" / "h200-sxm.json")
    lists = {path.stem: read_list(path, {}) for path in sorted(folder.glob("*_gpu*.toml"))}
    rows = [row for part in lists.values() for row in part]
    assert len(rows) == len({row.spec for row in rows}), "a step that was tried is not held out"
    for name, part in lists.items():
        gpus = 4 if "four" in name else 2 if "two" in name else 1
        assert {getattr(row.spec, "ranks", 1) for row in part} == {gpus}
    assert sum(bool(row.expect) for row in rows) >= 5  # written before any row was run
    for row in rows[::8]:
        if getattr(row.spec, "ranks", 1) < 4:
            assert predicted(row.spec, machine).median("step_ms") > 1
