"""Every bad input of every option of every command gives one sentence and status 2, before anything
is measured.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu_trace import GpuTrace

from stepgauge import cli
from stepgauge.cli import console

WANTED = 300
# Required arguments of commands.
POSITIONAL = {
    ("bench", "op"): ("examples/softmax.py:softmax",),
    ("predict",): ("--hardware=dgx-h100",),
    ("plan",): ("--hardware=dgx-h100",),
}


def commands(app, path=()):
    """Yields the path and the fields of each command whose options come from a spec."""
    for name in app:
        if name.startswith("-"):
            continue
        sub = app[name]
        if fields := getattr(sub.default_command, "fields", None):
            yield (*path, name), fields
        yield from commands(sub, (*path, name))


def bad_values(field):
    """Returns texts that are invalid for the field's declared type and limits."""
    kind, limits = field.type, field.metadata
    if field.name == "device":
        return ["toaster", "cuda:x"]
    if field.name == "model":
        return ["mine", "absent.py:make", "mine.txt:make"]
    if kind is bool:
        return ["maybe", "2"]
    if limits["choices"]:
        return ["dance"]
    if field.name.endswith("_bytes"):
        return ["1X", "many", "nan"]
    if kind not in (int, float):
        return []
    low, high = limits["least"], limits["most"]
    return [
        "four",
        *(["1.5"] if kind is int else ["nan", "inf"]),
        *([str(low - 1)] if low is not None else []),
        *([str(high + 1)] if high is not None and high < 1e15 else []),
    ]


def cases():
    for path, fields in commands(cli.app):
        for field in fields.values():
            flag = f"--{(field.metadata['flag'] or field.name).replace('_', '-')}"
            for text in bad_values(field):
                yield (*path, *POSITIONAL.get(path, ()), f"{flag}={text}"), flag
            if field.metadata["flag_value"] is None:
                yield (*path, *POSITIONAL.get(path, ()), flag), f"{flag} needs a value"
        needed = POSITIONAL.get(path, ())
        yield (*path, *needed, "--dance"), "Unknown option"
        yield (*path, *needed, "--out="), "--out is empty"


def test_every_bad_input_is_one_sentence_that_names_the_option_and_status_2(stepgauge):
    """Tries WANTED cases, taken from all commands in turn."""
    everything = [list(group) for _, group in itertools.groupby(cases(), key=lambda c: c[0][:2])]
    turns = [case for turn in itertools.zip_longest(*everything) for case in turn if case]
    assert len(turns) > WANTED
    wrong = []
    for number in range(WANTED):
        arguments, name = turns[number * len(turns) // WANTED]
        status, out, err = stepgauge(*arguments)
        sentences = [line for line in err.splitlines() if line.startswith("stepgauge:")]
        known = err.startswith((f"stepgauge: {name}", "stepgauge: Unknown option: --out"))
        if status != 2 or len(sentences) != 1 or "Traceback" in out + err or not known:
            wrong.append((arguments, status, out[:100], err[:300]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("topo", "--report", "{folder}"), 1, "cannot use {folder}: Is a directory"),
        (("comm", "explain", "scatter", "--ranks", "9"), 2, "--ranks is 9"),
        (("show", "{folder}/none"), 2, "no run at {folder}/none"),
        (("report", "{folder}/none"), 2, "no run at {folder}/none"),
        (
            ("show", "{folder}/bad.toml"),
            2,
            "{folder}/bad.toml is a file; name the folder of a run, or a .jsonl or .json file of records",
        ),
        (("bench", "step", "--config"), 2, "--config needs a value"),
        (("predict", "--size", "nano"), 2, "predict needs a value for --hardware"),
        (("schedule", "check"), 2, "schedule check needs a value for WHICH"),
        (("bench", "step", "--config", "{folder}/none.toml"), 2, "there is no such file"),
        (
            ("bench", "step", "--config", "{folder}/cut.toml"),
            2,
            "--config {folder}/cut.toml is not valid TOML",
        ),
        (("bench", "step", "--config", "{folder}/bad.toml"), 2, "--batch is -2"),
        (("--config", "{folder}/bad.toml", "bench", "step"), 2, "--batch is -2"),
        (("bench", "step", "--config", "{folder}/odd.toml"), 2, "Did you mean batch?"),
        (("train", "--steps", "2", "--steps", "3"), 2, "--steps is given 2 times"),
        (("train", "--size", "10b", "--device", "cpu"), 1, "GiB of memory"),
        (("train", "--data-parallel", "zero1"), 2, "has no effect on one rank: give --ranks"),
        (("bench", "step", "--phases", "forward", "--optimizer", "sgd"), 2, "has no effect here"),
        (("bench", "step", "--checkpoint-blocks", "99"), 2, "has no effect here: leave it out"),
        (("study", "--only", "dance"), 2, "--only is 'dance'; choose from step-time, "),
        (("comm", "explain", "dance"), 2, "op is 'dance'"),
        (("model", "--batch", "-1"), 2, "--batch is -1"),
        (("bench", "step", "--turns", "0"), 2, "--turns is 0; it must be 1 or more"),
        (("tune", "--best", "x"), 2, "--best is 'x'; it must be a whole number"),
        (("schedule", "simulate", "1f1b", "--forward", "x"), 2, "--forward is 'x'; it must be a"),
        (("bench", "layout", "--layout", "dp2 zer3"), 2, "--layout has 'zer3'; did you mean zero3"),
        (("bench", "comm", "-b", "4M", "-e", "1M"), 2, "and --end must not be less"),
        (
            ("bench", "layout", "--seconds", "0.2"),
            2,
            "bench layout has no --seconds, because all ranks",
        ),
        (("bench", "step", "--seconds"), 2, "--seconds needs a value"),
        (
            ("calibrate", "--only", "links", "--device", "cpu"),
            2,
            "needs several ranks: add --ranks 2",
        ),
        (
            ("calibrate", "--only", "cast", "dance", "--device", "cpu"),
            2,
            "--only is 'dance'; names begin",
        ),
        (("predict", "--hardware", "h100"), 2, "did you mean dgx-h100 or h100-sxm?"),
        (("model", "--size", "bert-huge"), 2, "--size is 'bert-huge'; choose one of"),
        (
            ("validate", "{folder}/rows.toml"),
            2,
            "row 1 of {folder}/rows.toml: the network is missing: give",
        ),
        (("completion", "cmd"), 2, 'Choose from: "bash"'),
    ],
)
def test_mistakes_that_were_once_tracebacks_or_unclear(
    stepgauge, tmp_path, arguments, status, message
):
    (tmp_path / "bad.toml").write_text("[bench.step]\nbatch = [4, -2]\n")
    (tmp_path / "cut.toml").write_text("[bench.step")
    (tmp_path / "rows.toml").write_text("[[rows]]\nbatch = 4\n")
    (tmp_path / "odd.toml").write_text("[bench.step]\nbacth = 4\n")
    given = [text.replace("{folder}", str(tmp_path)) for text in arguments]
    found, out, err = stepgauge(*given)
    assert found == status and "Traceback" not in err + out
    assert message.replace("{folder}", str(tmp_path)) in err


def test_a_file_that_is_not_a_trace_is_one_sentence(stepgauge, tmp_path):
    (tmp_path / "my.json").write_text("# mine")
    status, out, err = stepgauge("profile", "trace", tmp_path / "my.json")
    assert (status, out) == (2, "")
    assert (
        err
        == f"stepgauge: {tmp_path}/my.json is not a Chrome trace: it begins with '#', not with {{ or [\n"
    )


@pytest.mark.parametrize("command", [("bench", "step"), ("train",), ("profile", "memory")])
def test_a_file_instead_of_the_run_folder_is_refused_before_torch_is_imported(
    stepgauge, tmp_path, monkeypatch, command
):
    (tmp_path / "my.py").write_text("")
    monkeypatch.setitem(sys.modules, "stepgauge.measure.devices", None)  # which imports torch
    for out in ("my.py", "my.py/run"):
        status, _, err = stepgauge(*command, "--size", "nano", "--out", tmp_path / out)
        assert status == 1 and f"{tmp_path}/my.py is a file, not a folder" in err


def test_options_of_a_configuration_file_are_overridden_by_the_command_line(stepgauge, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nsize = ["nano", "tiny"]\nbatch = 2\n')
    status, out, _ = stepgauge("model", "--config", path, "--size", "mini", "--format", "csv")
    assert status == 0 and [line.split(",")[0] for line in out.splitlines()] == ["size", "mini"]
    status, out, _ = stepgauge("model", "--format", "csv", "--config", path)
    assert len(out.splitlines()) == 3
    path.write_text("batch = 2\n[model]\n")
    status, out, err = stepgauge("model", "--config", path)
    assert status == 2 and not out and "'batch', which is not a command" in err
    path.write_text("[bench.stepp]\nbatch = 2\n")
    status, out, err = stepgauge("model", "--config", path)
    assert status == 2 and not out and "[bench] has 'stepp', which is not a command" in err


def test_a_wrong_value_imports_neither_torch_nor_matplotlib():
    wrong = [
        ["bench", "step", "--batch", "0"],
        ["bench", "step", "--checkpoint-blocks", "99"],
        ["bench", "op", "nothing"],
        ["comm", "explain", "dance"],
        ["study", "--only", "dance"],
        ["train", "--data-parallel", "zero1"],
        ["train", "--corpus", "absent.txt"],
        ["train", "--layout", "pp2 m4"],
        ["study", "--device", "toaster"],
        ["tune", "--best", "0"],
        ["tune", "--d-model", "7"],
        ["tune", "--model", "mine"],
        ["validate", "--layout", "dp2x"],
        ["validate", "--hardware", "absent.json"],
        ["calibrate", "--ranks", "1"],
        ["calibrate", "--device", "toaster"],
        ["bench", "step", "--hardware", "absent.json"],
        ["bench", "kernel", "attention", "--grid", "dance"],
        ["bench", "comm", "-f", "0"],
        ["bench", "comm", "-b", "4M", "-e", "1M"],
        ["bench", "layout", "--layout", "dp3"],
        ["profile", "memory", "--predict", "sm1"],
        ["plan", "--hardware", "absent.json"],
        ["predict", "--hardware", "absent.json"],
    ]
    code = (
        "import sys; from stepgauge import cli\n"
        f"print([cli.run(arguments) for arguments in {wrong}], "
        "'torch' in sys.modules, 'matplotlib' in sys.modules, cli.run(['report', 'absent']), "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{[2] * len(wrong)} False False 2 False\n", done.stderr


def test_a_command_imports_no_other_command_but_a_groups_help_imports_all():
    """Importing the other commands of bench would double the time until the message."""
    code = (
        "import sys; from stepgauge import cli\n"
        "cli.run(['bench', 'step', '--batch', '0'])\n"
        "print([name for name in sys.modules if name.startswith('stepgauge.cli.bench.')])\n"
        "cli.run(['bench', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded, shown = done.stdout.split("\n", 1)
    assert loaded == "['stepgauge.cli.bench.steps']", done.stderr
    assert all(
        words in shown for words in ("Check and time", "Time collectives", "Check, time and")
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_and_an_ascii_output_are_handled():
    code = "from stepgauge import cli; cli.main(['model', '--size', 'nano'])"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "stepgauge: cannot write the output: No space left on device\n"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = (
        "from stepgauge import cli; cli._load_listed_commands = list; "
        "cli.app = lambda *_, **__: print('10 – 20'); cli.main(['show'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ascii_only)
    assert (done.returncode, done.stdout) == (0, b"10 ? 20\n")


ALL_COMMANDS = [
    ["--help"],
    ["bench", "--help"],
    ["bench", "step", "--help"],
    ["model", "--hf-config", "net.json"],
    ["model", "--size", "nano", "--format", "latex"],
    ["predict", "--size", "nano", "--hardware", "gpu.json", "--terms"],
    ["plan", "--size", "nano", "--gpus", "1", "--hardware", "gpu.json"],
    ["schedule", "show", "1f1b"],
    ["schedule", "simulate", "1f1b"],
    ["show", "run"],
    ["compare", "run", "run"],
    ["profile", "trace", "trace.json"],
    ["completion", "bash"],
]


def test_files_are_utf_8_and_commands_work_in_an_ascii_locale(tmp_path):
    """With LC_ALL=C, and without Python's UTF-8 mode and locale coercion."""
    root = Path(__file__).parents[2]
    shutil.copy(root / "hardware/h100-sxm.json", tmp_path / "gpu.json")
    sizes = {"vocab_size": 500, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = {"model_type": "gpt2", "_name_or_path": "modèle", **sizes}
    (tmp_path / "net.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "run").mkdir()
    shutil.copy(
        root / "src/stepgauge/study/shipped/norm-layers.jsonl", tmp_path / "run/records.jsonl"
    )
    trace = GpuTrace()
    with trace.range("ProfilerStep#1"), trace.op("aten::mm"):
        trace.launch("größe_µ", 20)
    trace.write(tmp_path / "trace.json")
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    literal = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = (
        "import os, sys; from stepgauge import cli\n"
        "sys.stdout.reconfigure(errors='replace')\n"
        f"print([cli.run(arguments) for arguments in {ALL_COMMANDS}], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **locale, **literal},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == str([0] * len(ALL_COMMANDS)), done.stderr


FULL_DISK = """
import resource, sys
from stepgauge import cli
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    quick = ["--size", "nano", "--context", "16", "--device", "cpu", "--steps", "1", "--warmup", "1"]
    print(cli.run(["train", *quick, "--out", sys.argv[1] + "/train"]))
    print(cli.run(["profile", "step", *quick, "--out", sys.argv[1] + "/profile"]))
"""


def test_a_full_disk_in_train_and_profile_is_one_sentence(tmp_path):
    """Limits files to 100 kB, less than a checkpoint or a trace."""
    (tmp_path / "run.py").write_text(FULL_DISK)
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py", tmp_path], capture_output=True, text=True
    )
    assert done.stdout.count("1\n") == 2 and "Traceback" not in done.stdout + done.stderr
    assert "stepgauge: cannot write checkpoint" in done.stderr
    assert "the trace could not be written to" in done.stderr


def test_names_with_colons_are_not_replaced_by_emoji(capsys):
    console.info("device cuda:0 :smile: [bold]")
    assert "device cuda:0 :smile: [bold]" in capsys.readouterr().err
