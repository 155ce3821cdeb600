"""The `profile` commands as a user sees them."""

import gzip
import json
from pathlib import Path

import pytest
from tests.sentences import one_sentence

from stepgauge.spec.store import RunStore

H100 = Path(__file__).parents[2] / "hardware" / "h100-sxm.json"
NANO = (
    "--size",
    "nano",
    "--context",
    "16",
    "--vocab-size",
    "300",
    "--batch",
    "2",
    "--device",
    "cpu",
)
QUICK = (*NANO, "--steps", "2", "--seconds", "0", "--warmup", "1", "--active", "1", "--wait", "0")


def test_profile_step_then_its_trace(stepgauge, tmp_path):
    run = tmp_path / "run"
    status, out, err = stepgauge("profile", "step", *QUICK, "--attention", "eager", "--out", run)
    assert status == 0, err
    for words in (
        "sum of ranges",
        "blocks.*.attention.softmax",
        "Kinds of work",
        "Operations with most time",
        "of\nroofline",
    ):
        assert words.split("\n")[0] in out
    (record,) = RunStore(run).read().records
    assert record.kind == "profile"
    assert record.median("kind_matmul_ms") > 0
    assert '<figure class="flame"' in (run / "report.html").read_text()
    (place,) = (run / "profiles").iterdir()
    assert {path.name for path in place.iterdir()} == {"analysis.json", "trace.json.gz"}
    status, out, err = stepgauge(
        "profile", "trace", place / "trace.json.gz", "--out", tmp_path / "again"
    )
    assert status == 0, err
    assert "blocks.*.attention.softmax" in out
    assert (tmp_path / "again" / "report.html").exists()
    status, out, _ = stepgauge(
        "profile", "step", *QUICK, "--attention", "eager", "--out", run, "--format", "csv"
    )
    assert status == 0
    assert len(RunStore(run).read().records) == 1  # the row was reused
    status, out, err = stepgauge(
        "profile", "step", *QUICK, "--attention", "eager", "--out", run, "--hardware", H100
    )
    assert status == 0 and "not predicted: --device is 'cpu'; the hardware file h100-sxm" in err
    assert stepgauge("show", run)[0] == 0


def test_traces_of_one_name_keep_their_own_folders(stepgauge, tmp_path, gpu_trace_text):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trace.json").write_text(gpu_trace_text)
    files = [tmp_path / folder / "trace.json" for folder in ("first", "second")]
    status, out, err = stepgauge("profile", "trace", *files, "--out", tmp_path / "out")
    assert status == 0, err
    assert "stopwatch" not in out  # another program's trace has no stopwatch time
    assert all(
        (tmp_path / "out" / folder / "trace" / "analysis.json").exists()
        for folder in ("first", "second")
    )
    report = (tmp_path / "out" / "report.html").read_text()
    for rank, folder in enumerate(("first", "second")):
        assert f"<dt>Rank {rank}</dt><dd>{folder}/trace</dd>" in report
        assert f"<h2>Rank {rank}</h2>" in report
    status, _, err = stepgauge("profile", "trace", files[0], files[0])
    assert status == 2
    assert "give each trace once" in one_sentence(err)


def test_a_trace_and_its_gzip_copy_are_two_traces_and_out_is_suggested(
    stepgauge, tmp_path, gpu_trace_text
):
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(gpu_trace_text)
    packed.write_bytes(gzip.compress(gpu_trace_text.encode()))
    status, _, err = stepgauge("profile", "trace", plain, packed)
    assert status == 0, err
    assert "--out FOLDER also writes" in err


def test_files_are_written_even_if_the_reader_closes_the_pipe(
    stepgauge, tmp_path, gpu_trace_text, closed_pipe
):
    """As in `stepgauge profile ... | head`."""
    path = tmp_path / "trace.json"
    path.write_text(gpu_trace_text)
    for command, folder in (
        (("trace", path), "traced"),
        (("step", *QUICK), "profiled"),
        (("memory", *NANO), "tracked"),
    ):
        with closed_pipe():
            status, _, err = stepgauge("profile", *command, "--out", tmp_path / folder)
        assert status == 0, err
        assert (tmp_path / folder / "report.html").exists()
    assert (tmp_path / "traced" / "trace" / "analysis.json").exists()


def test_json_of_several_tables_is_one_document(stepgauge, tmp_path, gpu_trace_text):
    path = tmp_path / "trace.json"
    path.write_text(gpu_trace_text)
    status, out, err = stepgauge("profile", "trace", path, "--format", "json")
    assert status == 0, err
    phases = json.loads(out)[0]
    assert phases["caption"].startswith("Phases")
    assert phases["rows"][-1]["phase"] == "step"
    assert phases["rows"][-1]["trace ms"] > 0


def test_rows_of_one_size_are_labelled_by_what_differs(stepgauge, tmp_path):
    status, out, err = stepgauge(
        "profile", "step", *QUICK, "--attention", "eager", "sdpa", "--out", tmp_path / "run"
    )
    assert status == 0, err
    assert "attention=sdpa\n" in out
    assert "attention=eager\n" in out
    assert "<h2>attention=eager</h2>" in (tmp_path / "run" / "report.html").read_text()


def test_a_foreign_file_is_one_sentence_and_status_2(stepgauge, tmp_path, gpu_trace_text):
    cases = {
        "cut.json": (gpu_trace_text[:-200], "ends in the middle"),
        "foreign.json": ('{"name": "x"}', "has no traceEvents"),
        "empty.json": ('{"traceEvents": []}', "neither kernels nor operations"),
        "text.json": ("hello", "is not a Chrome trace"),
    }
    for name, (text, words) in cases.items():
        path = tmp_path / name
        path.write_text(text)
        status, out, err = stepgauge("profile", "trace", path)
        assert (status, out) == (2, "")
        assert words in one_sentence(err)
    status, _, err = stepgauge("profile", "trace", tmp_path / "absent.json")
    assert status == 2
    assert "No such file" in one_sentence(err)
    status, _, err = stepgauge("profile", "trace")
    assert status == 2
    assert "FILE needs a value" in one_sentence(err)


def test_overlap_of_a_rank_and_of_a_trace_without_communication(
    stepgauge, tmp_path, gpu_trace_text
):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(gpu_trace_text.encode()))
    status, out, _ = stepgauge("profile", "trace", path, "--format", "csv")
    assert status == 0
    assert "0,0.15,0.41,0.06,0.09,0.4" in out.splitlines()
    silent = json.loads(gpu_trace_text)
    silent["traceEvents"] = [e for e in silent["traceEvents"] if "nccl" not in e["name"]]
    (tmp_path / "silent.json").write_text(json.dumps(silent))
    status, out, _ = stepgauge("profile", "trace", tmp_path / "silent.json")
    assert status == 0
    assert "Overlap" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--active", "0"), "--active is 0; it must be at least 1"),
        (("--precision", "fp7"), "--precision is 'fp7'; choose one of"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(stepgauge, tmp_path, arguments, words):
    status, _, err = stepgauge("profile", "step", *QUICK, *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert words in one_sentence(err)
    assert not (tmp_path / "run").exists()


def test_mistakes_with_a_users_model_are_one_sentence(stepgauge, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("")
    own_network = "a user's model has its own network and batch"
    for arguments, words in (
        (("absent.py:make",), "there is no file absent.py"),
        (("mine",), "name it as FILE.py:factory"),
        ((f"{mine}:make", "--size", "medium"), f"--size is 'medium'; {own_network}"),
        ((f"{mine}:make", "--context", "64"), f"--context is 64; {own_network}"),
        ((f"{mine}:make", "--batch", "8"), f"--batch is 8; {own_network}"),
        ((f"{mine}:make", "--checkpointing", "blocks"), "a user's model chooses its own"),
        (
            (f"{mine}:make", "--compile", "blocks"),
            "--compile is 'blocks'; the blocks of a user's model",
        ),
    ):
        for command in (("profile", "step"), ("profile", "memory"), ("bench", "step")):
            status, _, err = stepgauge(*command, "--device", "cpu", "--model", *arguments)
            assert status == 2
            assert words in one_sentence(err) or "tracked only with off" in err


def test_dtypes_has_no_options_that_change_no_type(stepgauge):
    status, out, _ = stepgauge("profile", "dtypes", "--help")
    assert status == 0
    assert "--precision" in out and "--model" in out
    for name in ("phases", "predict", "compile", "optimizer", "checkpointing", "data", "seed"):
        assert f"--{name}" not in out
    status, _, err = stepgauge("profile", "dtypes", "--phases", "forward")
    assert status == 2
    assert "--phases" in one_sentence(err)


def test_checkpoint_blocks_multiply_only_rows_with_checkpointing(stepgauge, tmp_path):
    run = tmp_path / "run"
    sweep = (
        "--predict",
        "cpu",
        "--checkpointing",
        "none",
        "blocks",
        "--checkpoint-blocks",
        "2",
        "1",
    )
    status, _, err = stepgauge("profile", "memory", *NANO, *sweep, "--out", run)
    assert status == 0, err
    rows = [
        (r.provenance, r.spec["checkpointing"], r.spec["checkpoint_blocks"])
        for r in RunStore(run).read().records
    ]
    expected = [("none", 1), ("blocks", 2), ("blocks", 1)]
    assert rows == [("modelled", *each) for each in expected]
    assert (
        "--checkpoint-blocks has no effect in 1 of 4 rows; rows that differ only in it run once"
        in err
    )


def test_a_row_of_a_users_model_is_named_by_file_and_function(stepgauge, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\ndef perceptron():\n    return torch.nn.Linear(8, 8), (torch.randn(4, 8),)\n"
    )
    run = tmp_path / "run"
    status, _, err = stepgauge(
        "profile", "memory", "--device", "cpu", "--model", f"{file}:perceptron", "--out", run
    )
    assert status == 0, err
    status, out, _ = stepgauge("show", run, "--format", "csv")
    assert status == 0
    assert out.splitlines()[1].startswith("mine.py:perceptron,fp32,")


def test_for_several_ranks_the_first_table_has_a_line_per_rank(stepgauge, tmp_path, gpu_trace_text):
    silent = json.loads(gpu_trace_text)
    silent["traceEvents"] = [
        e for e in silent["traceEvents"] if "nccl" not in e.get("name", "").lower()
    ]
    for name, text in (("rank0.json", gpu_trace_text), ("rank1.json", json.dumps(silent))):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    status, out, err = stepgauge("profile", "trace", *files, "--format", "csv")
    assert status == 0 and "tables across all 2 traces come first" in err
    head, *rows = (line.split(",") for line in out.splitlines()[:3])
    assert head == [
        "rank",
        "step ms",
        "busy ms",
        "idle ms",
        "communication ms",
        "overlap",
        "exposed ms",
    ]
    talking, quiet = (dict(zip(head, row, strict=True)) for row in rows)
    assert float(talking["busy ms"]) + float(talking["idle ms"]) == pytest.approx(
        float(talking["step ms"]), rel=1e-2
    )
    hidden = float(talking["overlap"]) * float(talking["communication ms"])
    assert hidden + float(talking["exposed ms"]) == pytest.approx(
        float(talking["communication ms"]), rel=1e-2
    )
    assert quiet["communication ms"] == quiet["overlap"] == quiet["exposed ms"] == ""
