"""`tune`: a small search on this machine, and the file that it leaves."""

import shlex


def test_the_winner_is_told_and_its_file_asks_for_the_same_row(stepgauge, tmp_path):
    out = tmp_path / "run"
    brief = ("--steps", "1", "--warmup", "1", "--seconds", "0")
    status, text, err = stepgauge(
        "tune", "--size", "nano", "--context", "16", "--vocab-size", "64", "--precision", "fp32",
        "--compile", "off", "--checkpointing", "none", "--batch", "1", "2", *brief,
        "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert status == 0, err
    command = text.splitlines()[-1]
    assert command.startswith("stepgauge bench step ") and "--steps 1 --" in command
    assert "--size nano" in command and "--device cpu" in command and "adamw" not in command
    assert "2 candidates could be predicted" in err and "tokens/s" in err
    status, text, err = stepgauge(
        "bench", "step", "--config", out / "tuned.toml", "--out", out, "--format", "json"
    )
    assert status == 0, err
    assert "1 of 1 rows were already in" in err
    status, _, err = stepgauge(*shlex.split(command)[1:], "--out", out)
    assert status == 0 and "1 of 1 rows were already in" in err


def test_what_cannot_be_tuned_is_told(stepgauge):
    for arguments, said in (
        (("--size", "vast"), "size is 'vast'"),
        (("--best", "0", "--device", "cpu"), "best is 0"),
        (("--device", "cpu", "--ranks", "2", "--phases", "forward"), "phases is no option"),
        (("--device", "cpu", "--precision", "fp32", "--d-model", "7"), "d_model"),
    ):
        status, _, err = stepgauge("tune", *arguments)
        assert status == 2 and said in err, (arguments, err)
