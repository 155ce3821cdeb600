"""The command line as a user sees it: one sentence for each mistake, and the right exit status."""

import dataclasses
import errno
import importlib.resources
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tests.cpu_machine import made_up
from tests.sentences import one_sentence

from stepgauge import cli
from stepgauge.cli import console
from stepgauge.cli import rows as command_rows
from stepgauge.measure.environment import environment
from stepgauge.runtime.host import thread_settings
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.kinds import COMMANDS, SPECS
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore

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
QUICK = (*NANO, "--steps", "2", "--seconds", "0", "--warmup", "1")


def rows(path):
    return RunStore(path).read().records


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "huge"), "--size is 'huge'; choose one of nano"),
        (("--num-heads", "5"), "--num-heads is 5, which does not divide --d-model 64"),
        (("--batch", "-4"), "--batch is -4; it must be at least 1"),
        (("--batch", "99999999999"), "--batch is 99,999,999,999; it must be at most"),
        (("--batch", "four"), "--batch is 'four'; it must be a whole number"),
        (("--precision", "fp7"), "--precision is 'fp7'; choose one of fp32"),
        (("--precision", "tf32"), "tf32 is a mode of CUDA matrix units; cpu has none"),
        (("--device", "cuda:63"), "--device 'cuda:63' is not available"),
        (("--device", "toaster"), "--device is 'toaster'; choose cpu"),
        (("--seed",), "--seed needs a value"),
        (("--bogus", "1"), "Unknown option: --bogus"),
        (("--seq-len", "8"), "Unknown option: --seq-len. Did you mean --context?"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(stepgauge, tmp_path, arguments, words):
    status, _, err = stepgauge("bench", "step", *QUICK, *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert words in one_sentence(err)
    assert not (tmp_path / "run").exists()


def test_a_sweep_measures_each_row_and_resumes(stepgauge, tmp_path):
    sweep = ("bench", "step", *QUICK, "--precision", "fp32,bf16", "--d-ff", "32", "--out", tmp_path)
    status, out, err = stepgauge(*sweep)
    assert status == 0
    assert [r.spec["precision"] for r in rows(tmp_path)] == ["fp32", "bf16"]
    assert rows(tmp_path)[0].spec["size"] == "custom"  # not the preset's name
    assert out.count("\n") >= 4
    assert err.count(": warming up") == err.count(": forward ms") == 2  # before and after each row
    status, _, err = stepgauge(*sweep)
    assert status == 0
    assert "2 of 2 rows were already" in err
    status, _, _ = stepgauge(*sweep, "--precision", "bf16", "--fresh")
    assert len(rows(tmp_path)) > 2


def test_the_command_of_each_kind_of_record_exists():
    for kind, command in COMMANDS.items():
        assert kind in SPECS
        group = cli.app
        for word in command.split():
            group = group[word]


def test_compile_without_a_value_means_on(stepgauge, tmp_path, monkeypatch):
    specs_seen = []
    monkeypatch.setattr(
        "stepgauge.cli.rows.usable_jobs", lambda specs, out: specs_seen.extend(specs)
    )
    monkeypatch.setattr("stepgauge.cli.rows.run_jobs", lambda jobs, out, fresh, turns: [])
    stepgauge("bench", "step", *QUICK, "--compile", "--out", tmp_path)
    stepgauge("bench", "step", *QUICK, "--compile", "off", "blocks", "--out", tmp_path)
    assert [spec.compile for spec in specs_seen] == ["on", "off", "blocks"]


def test_running_out_of_memory_fails_only_if_no_row_fits(stepgauge, tmp_path):
    widths = ("bench", "step", *QUICK, "--out", tmp_path, "--d-model")
    status, _, err = stepgauge(*widths, "1000000")
    assert status == 1
    assert "no row has a result: needs at least" in one_sentence(err)
    status, out, err = stepgauge(*widths, "64", "1000000", "--fresh")
    assert status == 0
    assert rows(tmp_path)[-1].status == "oom"
    assert "OOM: needs at least" in out
    assert "OOM" in err


def test_an_output_folder_that_cannot_be_written(stepgauge, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = stepgauge("bench", "step", *QUICK, "--out", tmp_path / "file" / "run")
    assert status == 1
    assert "cannot write to" in one_sentence(err)


def test_a_full_disk_prints_the_row_that_could_not_be_saved(stepgauge, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    status, out, err = stepgauge("bench", "step", *QUICK, "--out", tmp_path)
    assert status == 1
    assert "No space left on device" in one_sentence(err)
    assert json.loads(out.strip().splitlines()[-1])["metrics"]["step_ms"]["n"] == 2


@pytest.fixture
def run_folder(tmp_path, record):
    store = RunStore(tmp_path / "run")
    store.prepare()
    for size in ("small", "medium"):
        store.append(record(size, step=[10.0, 11.0, 12.0]))
    return store.folder


@pytest.mark.parametrize(
    ("format", "start"),
    [
        ("csv", "size,"),
        ("markdown", "batch=4, context=512, precision=fp32 on Test GPU\n\n| size |"),
        ("latex", "% batch=4, context=512, precision=fp32 on Test GPU\n\\begin{tabular}"),
        ("json", "[{"),
    ],
)
def test_show_in_every_format(stepgauge, run_folder, format, start):
    status, out, _ = stepgauge("show", run_folder, "--format", format)
    assert status == 0
    assert out.startswith(start)
    assert "medium" in out
    if format == "json":
        assert [row["kind"] for row in json.loads(out)] == ["step", "step"]


def test_a_file_of_records_is_read_like_a_run(stepgauge, run_folder, tmp_path):
    path = (run_folder / "records.jsonl").rename(tmp_path / "kept.jsonl")
    status, out, err = stepgauge("show", path, "--format", "json")
    assert status == 0 and len(json.loads(out)) == len(RunStore(path).read().records), err
    assert stepgauge("report", path)[:2] == (0, f"{tmp_path}/kept.html\n")
    status, _, err = stepgauge("compare", path, path)
    assert status == 0, err
    status, _, err = stepgauge("bench", "step", *QUICK, "--out", path)
    assert status == 1 and f"{path} is a file, not a folder" in one_sentence(err)


def test_show_refuses_rows_of_a_script(stepgauge):
    path = "benchmarks/results/2026-11-28-h200-tensor-parallel-four.jsonl"
    status, out, err = stepgauge("show", Path(__file__).parents[2] / path)
    assert (status, out) == (2, "")
    assert "holds no records of stepgauge but rows with the fields ranks, way, " in one_sentence(
        err
    )


def test_show_warns_of_damaged_lines_and_shows_the_rest(stepgauge, run_folder):
    with (run_folder / "records.jsonl").open("a") as file:
        file.write('{"schema": 1, "kind": "st\n')
    status, out, err = stepgauge("show", run_folder)
    assert status == 0
    assert "line 3 is damaged" in one_sentence(err)
    assert "small" in out
    assert "medium" in out


def test_a_run_without_a_good_record_has_no_page(stepgauge, run_folder):
    (run_folder / "records.jsonl").write_text('{"schema": 1, "kind": "st\n')
    for command in ("report", "show"):
        status, out, err = stepgauge(command, run_folder)
        assert (status, out) == (2, "") and "holds no records" in err
    assert not (run_folder / "report.html").exists()


def test_show_refuses_missing_runs_and_unknown_statistics(stepgauge, tmp_path, run_folder):
    status, _, err = stepgauge("show", tmp_path / "none")
    assert status == 2
    assert "no run at" in one_sentence(err)
    status, _, err = stepgauge("show", run_folder, "--statistics", "mode")
    assert status == 2
    assert "--statistics is 'mode'" in one_sentence(err)


def test_compare_marks_differences_that_exceed_the_spread(stepgauge, tmp_path, record, run_folder):
    other = RunStore(tmp_path / "other")
    other.prepare()
    other.append(record("small", step=[10.5, 11.5, 12.5]))
    other.append(record("medium", step=[20.0, 22.0, 24.0]))
    status, out, err = stepgauge("compare", run_folder, other.folder)
    assert status == 0
    small, medium = (line for line in out.splitlines() if "step ms" in line)
    assert "1.045  within spread" in small and "2.000  differs" in medium
    assert "2.000" in out
    assert "1 of 2 figures differ" in err
    status, _, err = stepgauge("compare", run_folder, other.folder, "--format", "csv")
    assert status == 0


def test_compare_of_runs_without_common_rows(stepgauge, tmp_path, record, run_folder):
    other = RunStore(tmp_path / "other")
    other.prepare()
    other.append(record("large"))
    status, _, err = stepgauge("compare", run_folder, other.folder)
    assert status == 2
    assert "share no row" in one_sentence(err)
    status, _, err = stepgauge("compare", run_folder, other.folder, "--ignoring", "size")
    assert status == 2  # the shape differs too
    message = one_sentence(err)
    assert "share no row: the closest differ in " in message
    assert "--ignoring" not in message, "without these the two rows of run A are one"


def test_compare_suggests_the_option_that_pairs_the_rows(stepgauge, tmp_path, record):
    runs = [RunStore(tmp_path / name) for name in ("a", "b")]
    for run, steps in zip(runs, (10, 20), strict=True):
        run.prepare()
        run.append(record("small", steps=steps))
    asked = ("compare", runs[0].folder, runs[1].folder)
    message = one_sentence(stepgauge(*asked)[2])
    assert message.endswith(
        "share no row: the closest differ in steps; --ignoring steps pairs them"
    )
    assert stepgauge(*asked, "--ignoring", "steps")[0] == 0


def test_model_prints_full_precision_as_json(stepgauge):
    _, out, _ = stepgauge("model", "--size", "nano", "--batch", 1, "--format", "json")
    (row,) = json.loads(out)
    network = ModelSpec.preset("nano")
    assert row["parameters"] == network.num_parameters
    assert row["step TFLOP"] == network.step_flops(batch=1, sequence=512) / 1e12


TRAIN = (
    "train",
    "--size",
    "nano",
    "--context",
    "32",
    "--steps",
    "12",
    "--batch",
    "2",
    "--device",
    "cpu",
)


def test_train_prints_losses_and_recognises_a_complete_run(stepgauge, tmp_path):
    asked = ("--evaluate-every", "6", "--attention", "triton", "--out", tmp_path,
             "--vocab-size", "256")  # fmt: skip
    status, out, err = stepgauge(*TRAIN, *asked)
    assert status == 0
    assert "attention triton ran in plain PyTorch: no CUDA GPU" in err
    assert out.startswith("loss 5.")
    assert "parameters on" in out and "tokens/s; run in" in out
    assert err.count(", held out 5.") == 2 and "step 1 of 12: loss 5." in err
    assert err.count("nats a token") == 3 and "(vocabulary 256), held out 5." in out
    (record,) = rows(tmp_path)
    assert record.series["step"] == list(range(1, 13))
    # A complete run is not recorded again, and another model cannot use its checkpoint.
    status, _, err = stepgauge(*TRAIN, *asked)
    assert status == 0 and "the run is already complete, at step 12\n" in err
    command = [sys.executable, "-m", "stepgauge", *TRAIN, *map(str, asked), "--layout", "dp2 zero1"]
    done = subprocess.run(
        command, capture_output=True, text=True
    )  # rank 0 says it, in its own process
    assert done.returncode == 0 and (
        "already complete, at step 12: it was trained under layout 'none'; to train under 'dp2 zero1', "
        "start another run with --out FOLDER"
    ) in " ".join(done.stderr.split())
    status, _, err = stepgauge(*TRAIN, *asked, "--d-ff", "64")
    assert status == 1
    assert "is of another run: --d-ff 256 there, 64 here" in one_sentence(err)
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\0\1", "is binary"),
        (b"short text\n", "is too short"),
    ],
)
def test_a_bad_corpus_is_one_sentence(stepgauge, tmp_path, content, words):
    path = tmp_path / "corpus"
    if content is not None:
        path.write_bytes(content)
    status, _, err = stepgauge(*TRAIN, "--corpus", path, "--out", tmp_path / "run")
    assert status == 2
    assert words in one_sentence(err)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "there is no checkpoint before step 5; the same command starts from the beginning"),
        ((5, 10), "the same command resumes from step 10 of 12"),
    ],
)
def test_an_interrupted_training_run_says_where_it_resumes(
    stepgauge, tmp_path, monkeypatch, steps, message
):
    def interrupted(*_, **__):
        for step in steps:
            (tmp_path / "run/checkpoints" / f"step-{step:09d}").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("stepgauge.bench.train.run", interrupted)
    status, _, err = stepgauge(*TRAIN, "--checkpoint-every", 5, "--out", tmp_path / "run")
    assert (status, err.splitlines()[-1]) == (130, f"stepgauge: interrupted: {message}")


@pytest.mark.parametrize("layout", ["none", "dp2 zero1"])
def test_an_interrupted_training_run_keeps_a_record_of_its_steps(stepgauge, tmp_path, layout):
    """The ranks of a layout are killed, so they cannot write it then."""
    out = tmp_path / "run"
    options = ["2000" if word == "12" else word for word in TRAIN]
    command = [*options, "--evaluate-every", "10", "--layout", layout, "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "stepgauge", *command], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        for line in process.stderr:
            if line.startswith("step 10 of"):
                process.send_signal(signal.SIGINT)
                break
        err = process.stderr.read()
    (record,) = rows(out)
    steps = record.series["step"]
    assert f"interrupted: the loss of {len(steps)} steps is in {out}; there is no checkpoint" in err
    assert record.note == f"stopped at step {steps[-1]} of 2000" and len(steps) >= 10
    assert record.metrics.keys() >= {"first_loss", "last_loss", "held_out", "tokens_per_s"}
    assert record.median("last_loss") == record.series["loss"][-1]
    assert record.series["held_out_bits_per_byte"] and "corpus_bytes" in record.environment
    assert record.metrics["held_out"].unit == "bits/byte"
    assert "stopped at step" in stepgauge("show", out)[1]
    assert stepgauge("report", out)[0] == 0


def test_a_killed_training_run_is_recorded_when_it_is_resumed(stepgauge, tmp_path, monkeypatch):
    def killed(spec, folder, **_):
        (folder / "curve.jsonl").write_text('{"step": 1, "loss": 2.0, "held_out": null}\n')
        record = Record.of(spec, metrics={"last_loss": Sample.exact(3.0, "nats/token")})
        (folder / "unfinished.json").write_text(record.to_json())
        raise AssertionError("killed")

    monkeypatch.setattr("stepgauge.bench.train.run", killed)
    with pytest.raises(AssertionError):
        stepgauge(*TRAIN, "--out", tmp_path)
    monkeypatch.undo()
    assert rows(tmp_path) == []
    assert stepgauge(*TRAIN, "--out", tmp_path)[0] == 0
    first, last = rows(tmp_path)
    assert (first.note, first.median("last_loss")) == ("stopped at step 1 of 12", 2.0)
    assert (last.note, last.series["step"][-1]) == ("", 12)
    assert not (tmp_path / "unfinished.json").exists()


def test_a_damaged_record_of_a_killed_training_run_is_no_obstacle(stepgauge, tmp_path):
    (tmp_path / "curve.jsonl").write_text('{"step": 1, "loss": 2.0, "held_out": null}\n')
    (tmp_path / "unfinished.json").write_text("")  # after a power cut
    assert stepgauge(*TRAIN, "--out", tmp_path)[0] == 0
    assert [record.note for record in rows(tmp_path)] == [""]
    assert not (tmp_path / "unfinished.json").exists()


@pytest.mark.parametrize(
    ("name", "status", "word"), [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "interrupted")]
)
def test_a_second_signal_does_not_stop_the_cleanup(name, status, word):
    """`timeout` signals both the command and its process group, so each signal arrives twice."""
    code = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from stepgauge import cli
def app(*_, **__):
    try:
        os.kill(os.getpid(), signal.{name})
    finally:
        os.kill(os.getpid(), signal.{name})
        print("cleaned up")
cli._load_listed_commands = list  # the app below has no commands
cli.app = app
cli.main(["show"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "cleaned up\n")
    assert done.stderr == f"stepgauge: {word}\n"


def test_an_interrupt_while_the_command_line_is_imported_is_a_sentence(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    half_imported = types.ModuleType("stepgauge.cli")
    half_imported.__getattr__ = interrupted
    monkeypatch.setitem(sys.modules, "stepgauge.cli", half_imported)
    with pytest.raises(SystemExit) as done:
        importlib.import_module("stepgauge.__main__").main()
    assert (done.value.code, capsys.readouterr().err) == (130, "stepgauge: interrupted\n")


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({"RANK": "1"}, True),
        ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}, True),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, True),
        (TORCHRUN, False),
    ],
)
def test_only_a_full_set_of_torchrun_variables_silences_a_rank(
    monkeypatch, capsys, environment, speaks
):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", sys.stdout)  # restored afterwards, because a rank replaces it
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(console.error_console, "quiet", False)
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert bool(capsys.readouterr().out) == speaks


def test_help_shows_values_as_a_user_types_them(stepgauge):
    sweeps, single = (
        " ".join(stepgauge(*command, "--help")[1].split())
        for command in (("bench", "comm"), ("train",))
    )
    assert "--size SIZE..." in sweeps and "[default: 1M]" in sweeps
    assert "--check -c true|false..." in sweeps
    assert "--tied-head [true|false] " in single and "--steps INT " in single
    assert "..." not in single


def test_bert_presets_are_sizes_of_bench_step_and_model(stepgauge):
    status, out, _ = stepgauge("model", "--size", "bert-tiny", "nano", "--format", "json")
    assert status == 0
    assert [row["parameters"] for row in json.loads(out)] == [
        ModelSpec.preset("nano").num_parameters
        if name == "nano"
        else BertSpec.preset(name).num_parameters
        for name in ("bert-tiny", "nano")
    ]
    assert "bert-base" in stepgauge("bench", "step", "--help")[1]
    told = " ".join(stepgauge("model", "--help")[1].split())
    assert "('nano'" not in told and "[all but BERT's]" in told


def test_help_fits_80_columns_and_needs_no_torch():
    code = """
import sys
from stepgauge import cli
for command in ([], ["bench", "step"], ["train"], ["study"], ["show"], ["compare"]):
    assert cli.run([*command, "--help"]) == 0
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={"COLUMNS": "80", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("Usage") == 6


@pytest.mark.parametrize("columns", ["0", "²", "wide"])
def test_a_width_that_is_none_hides_no_message(columns):
    done = subprocess.run(
        [sys.executable, "-m", "stepgauge", "bench", "step", "--size", "nope"],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": columns},
    )  # fmt: skip
    assert done.returncode == 2 and "'nope'; choose one of" in done.stderr


def test_the_page_of_a_run_needs_no_torch(tmp_path):
    shipped = importlib.resources.files("stepgauge.study") / "shipped" / "data-parallel.jsonl"
    (tmp_path / "records.jsonl").write_text(shipped.read_text())
    code = f"""
import sys
from stepgauge import cli
assert cli.run(["report", {str(tmp_path)!r}]) == 0
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_a_run_is_measured_by_one_process_at_a_time(stepgauge, tmp_path):
    with RunStore(tmp_path).held():
        status, _, err = stepgauge("bench", "step", *QUICK, "--out", tmp_path)
    assert status == 1
    assert "is in use by another process" in one_sentence(err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--precision", "tf32"), "tf32 is a mode of CUDA matrix units; cpu has none"),
        (("--vocab-size", "999"), "--vocab-size is 999; tokens are bytes, of which there are 256"),
        (("--warmup", "100"), "--warmup is 100 of 12 steps; choose at most 12"),
        (("--learning-rate", "nan"), "--learning-rate is nan; it must be a finite number"),
        (("--corpus", "a,b.txt"), "corpus a,b.txt does not exist"),
    ],
)
def test_a_mistake_in_training_is_one_sentence(stepgauge, tmp_path, arguments, words):
    status, _, err = stepgauge(*TRAIN, *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert words in one_sentence(err)


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(stepgauge, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    status, _, err = stepgauge(*TRAIN, "--out", tmp_path)
    assert status == 1
    assert "cannot write checkpoint" in one_sentence(err)


def test_study_refuses_wrong_experiments(stepgauge, tmp_path):
    for arguments, words in (
        (("--only", "dance"), "--only is 'dance'"),
        (("--only",), "--only needs a value"),
    ):
        status, _, err = stepgauge(
            "study", *arguments, "--device", "cpu", "--out", tmp_path / "run"
        )
        assert status == 2
        assert words in one_sentence(err)


def test_the_version(stepgauge):
    import stepgauge as package

    status, out, _ = stepgauge("--version")
    assert (status, out.strip()) == (0, package.__version__)


RESUMED = """
import sys
from stepgauge import cli
print(cli.run(sys.argv[1:]), "torch" in sys.modules)
"""


def test_complete_runs_are_shown_without_torch(stepgauge, tmp_path):
    made_up().write(tmp_path / "here.json")
    asked = ("bench", "step", *QUICK, "--hardware", tmp_path / "here.json", "--out", tmp_path / "r")
    _, before, _ = stepgauge(*asked)
    again = [sys.executable, "-c", RESUMED, *map(str, asked)]
    # readline, which pytest imports, adds COLUMNS to what children inherit, but not to os.environ.
    done = subprocess.run(again, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == before + "0 False\n", done.stderr
    assert "1 of 1 rows were already in" in done.stderr
    stepgauge(*asked, "--batch", "2,4")
    measured = [r for r in rows(tmp_path / "r") if r.provenance == "measured"]
    assert [record.spec["batch"] for record in measured] == [2, 4]


@pytest.mark.parametrize(
    "asked",
    [
        ("bench", "comm", "--op", "all_reduce", "--size", "1K,2K"),
        ("bench", "kernel", "rms-norm", "--rows", "8", "--width", "16"),
        ("bench", "pipeline", "--size", "nano", "--batch", "4", "--microbatches", "4"),
        ("bench", "op", "own.py:double"),
        ("profile", "memory", "--size", "nano", "--predict", "no,cpu"),
    ],
    ids=lambda asked: asked[1],
)
def test_complete_runs_of_other_commands_are_shown_without_torch(
    stepgauge, tmp_path, monkeypatch, asked
):
    def leave(jobs, out, **_):
        RunStore(out).prepare()
        where = {**environment(torch.device("cpu")), "thread_settings": thread_settings()}
        figures = {"step_ms": Sample.exact(1.0, "ms")}
        for job in jobs:
            row = dataclasses.replace(job.pending, metrics=figures, environment=where)
            RunStore(out).append(row)
        raise command_rows.RunFailedError("nothing is measured here")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def inputs(device): return ()\ndef double(): pass\n")
    asked = [*asked, "--device", "cpu", "--out", "r", "--format", "json"]
    with monkeypatch.context() as patched:
        patched.setattr(command_rows, "run_jobs", leave)
        patched.setattr(command_rows, "require_usable", lambda *_: None)
        assert stepgauge(*asked)[0] == 1
    again = [sys.executable, "-c", RESUMED, *asked]
    done = subprocess.run(again, capture_output=True, text=True)
    assert done.stdout.endswith("]\n0 False\n"), done.stderr
    assert len(json.loads(done.stdout.removesuffix("0 False\n"))) == len(rows("r"))
