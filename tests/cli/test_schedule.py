"""`stepgauge schedule` as a user sees it."""

import csv
import io
import json
import re

import pytest

from stepgauge import cli
from stepgauge.spec.plan.pipeline import build, from_csv, from_text


@pytest.fixture
def stepgauge(capfd):
    def run(*arguments):
        status = cli.run(list(map(str, arguments)))
        return status, *capfd.readouterr()

    return run


def test_show_prints_formats_that_can_be_read_again(stepgauge, tmp_path):
    wanted = build("zbv", ranks=3, micro_batches=6)
    asked = ("zbv", "--ranks", 3, "--microbatches", 6)
    status, text, _ = stepgauge("schedule", "show", *asked)
    assert (status, from_text(text, "zbv")) == (0, wanted)
    _, table, _ = stepgauge("schedule", "show", *asked, "--lowered", "--format", "csv")
    assert from_csv(table, "zbv").compute == wanted
    path = tmp_path / "mine.csv"
    path.write_text(table)
    status, printed, _ = stepgauge("schedule", "show", path, "--format", "json")
    assert (status, json.loads(printed)["name"], len(json.loads(printed)["ranks"])) == (
        0,
        "mine",
        3,
    )


def test_every_format_of_show_can_be_read(stepgauge, tmp_path):
    path = tmp_path / "mine"
    for format in ("text", "csv", "json"):
        for lowered in ((), ("--lowered",)):
            asked = ("schedule", "show", "1f1b", "--ranks", 2, "--microbatches", 2, *lowered)
            path.write_text(stepgauge(*asked, "--format", format)[1])
            for verb in "check", "simulate":
                assert stepgauge("schedule", verb, path)[0] == 0
            assert stepgauge("schedule", "show", path, "--format", format)[1] == path.read_text()
    for text in ('{"ranks": 3}', '{"name": "mine"}', '{"ranks": [[', "{}"):
        path.write_text(text)
        status, _, err = stepgauge("schedule", "check", path)
        assert status == 2 and "is not the JSON of a schedule" in err


def test_simulate_writes_the_format_of_the_files_suffix(stepgauge, tmp_path):
    asked = ("schedule", "simulate", "zbv", "--ranks", 2, "--write")
    for name, format in (("f.csv", "csv"), ("f.json", "json"), ("f.txt", "text")):
        path = tmp_path / name
        assert stepgauge(*asked, path)[0] == 0
        assert stepgauge("schedule", "show", path, "--format", format)[1] == path.read_text()
        status, _, err = stepgauge("schedule", "check", path)
        assert status == 0, err
    (tmp_path / "f.csv").write_text((tmp_path / "f.txt").read_text())
    status, _, err = stepgauge("schedule", "check", tmp_path / "f.csv")
    assert status == 2 and err.endswith(". Separate actions by commas in a .csv\n")
    assert len(err) < 300, "a line of actions is not quoted whole"


def test_simulate_draws_each_ranks_timeline_and_prints_bubbles(stepgauge, tmp_path):
    asked = ("schedule", "simulate", "1f1b", "--ranks", 2, "--microbatches", 2)
    status, out, err = stepgauge(*asked, "--report", tmp_path / "drawn.svg")
    lines = out.splitlines()
    assert status == 0, err
    forward, backward, waits = "F{}──────", "B{}──────────────", " " * 8
    drawn = forward.format(0) + forward.format(1)
    drawn += 2 * waits + backward.format(0) + waits + backward.format(1)
    assert lines[0] == f"rank 0  {drawn}"
    assert lines[2].split()[2:] == ["F0──────B0──────────────F1──────B1──────────────"]
    assert "F3: forward of micro-batch 3; B backward" in out
    assert "step 9 ms, 1.500 × ideal" in out
    # Below its actions stands what a rank holds: one of two micro-batches from 0 to 1 and 6 to 9.
    assert (lines[1][:8], lines[3][:8]) == ("peak 2  ", "peak 1  ")
    assert lines[1][8:] == "▄" * 8 + "█" * 40 + "▄" * 24
    assert lines[3][8:].rstrip() == " " * 8 + "▄" * 48
    assert max(map(len, lines)) == 80, "a line is as wide as the page, and does not wrap"
    svg = (tmp_path / "drawn.svg").read_text()
    assert all(
        word in svg
        for word in ("rank 1", "var(--series-2)", "held, pairs of micro-batch and stage")
    )
    assert "peak of each rank in pairs of micro-batch and stage: 2, 1." in svg
    for variable in re.findall(r"var\((--[\w-]+)", svg):
        assert f"{variable}: " in svg, "no page defines it for a file"
    _, out, _ = stepgauge(*asked, "--stage-weights", "1,2", "--format", "json")
    found = json.loads(out)
    assert found["step"] == 1 + 2 * 6 + 2
    assert found["spans"][0] == {"rank": 0, "action": "0F0", "start": 0.0, "end": 1.0}
    _, out, _ = stepgauge(*asked, "--format", "csv")
    assert [row["busy"] for row in csv.DictReader(io.StringIO(out))] == ["6.0", "6.0"]


def test_a_comma_in_a_comment_does_not_make_a_text_csv(stepgauge, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# two stages, one micro-batch\n0F0 0B0 # first, then\n1F0 1B0\n")
    assert stepgauge("schedule", "show", path)[:2] == (0, "0F0 0B0\n1F0 1B0\n")


def test_files_of_other_editors(stepgauge, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufeff0F0 0B0\r\n1F0 1B0\r\n".encode())
    assert stepgauge("schedule", "show", path)[:2] == (0, "0F0 0B0\n1F0 1B0\n")
    path.write_bytes(b"\xff\xfe\x00")
    status, _, err = stepgauge("schedule", "check", path)
    assert (status, err) == (2, f"stepgauge: {path} is not UTF-8 text\n")
    path.write_text("1000000000F0 1000000000B0\n")
    status, _, err = stepgauge("schedule", "simulate", path)
    assert (status, err) == (2, "stepgauge: 0F0 is missing\n")


@pytest.mark.parametrize("columns", [80, 100])
def test_a_step_wider_than_the_page_is_drawn_in_bands_with_every_action_named(
    stepgauge, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = stepgauge("schedule", "simulate", "zbv", "--ranks", 4)
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns and sum(line.startswith("from ") for line in lines) == 2
    for rank, actions in enumerate(build("zbv", ranks=4, micro_batches=8).ranks):
        drawn = "".join(line[8:] for line in lines if line.startswith(f"rank {rank} "))
        names = re.findall(r"\d+[FIW]\d+", drawn)
        assert names == list(map(str, actions)), "the stages of a rank are told apart"
        assert drawn.count(" ") == 4 * 3, "a rank waits 3 of 51: nothing else is empty"


def test_a_long_step_is_drawn_without_micro_batch_numbers_and_a_note_says_so(stepgauge):
    _, out, err = stepgauge("schedule", "simulate", "1f1b", "--microbatches", 64)
    assert "there is no room for the numbers" in err and not re.search(r"[FB]\d", out)
    assert max(map(len, out.splitlines())) == 80


def test_check_prints_what_each_rank_holds(stepgauge):
    status, out, _ = stepgauge("schedule", "check", "zb-h1", "--format", "json")
    assert status == 0
    assert [row["most held"] for row in json.loads(out)] == [4.0] * 4
    _, out, _ = stepgauge("schedule", "check", "1f1b", "--bound", "4")
    assert "The schedule can run: each stage runs each micro-batch forward and backward once" in out
    held = "A rank holds the activations of at most 4 pairs of micro-batch and stage"
    assert f"{held}, within the bound of 4." in out


def test_schedules_with_two_stages_per_rank_are_simulated_with_the_same_work(stepgauge):
    """p - 1 stages of (F, I, W) = 1 each are idle time of 1f1b; of zbv only F of half stages."""
    found = {}
    for name in ("1f1b", "zbv"):
        asked = ("schedule", "simulate", name, "--ranks", 4, "--microbatches", 8)
        found[name] = json.loads(stepgauge(*asked, "--format", "json")[1])["step"]
        rows = json.loads(stepgauge("schedule", "check", *asked[2:], "--format", "json")[1])
        assert [row["busy"] for row in rows] == [24.0] * 4
    assert found == {"1f1b": 24 + 9, "zbv": 24 + 1.5}
    explicit = ("--forward", 1, "--input", 1, "--weight", 1, "--format", "json")
    assert json.loads(stepgauge("schedule", "simulate", "zbv", *explicit)[1])["step"] == 51


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "zbw"), "schedule is 'zbw'; choose one of gpipe"),
        (
            ("check", "torch-zbv"),
            "schedule is 'torch-zbv', torch's own, which only bench pipeline runs",
        ),
        (("check", "zb-h1", "--bound", "3"), "rank 0 holds 4 at 0F3; the bound is 3"),
        (("check", "izb", "--microbatches", "9"), "--microbatches is 9"),
        (("check", "{file}", "--ranks", "3"), "--ranks is 3; {file} is for 2"),
        (("check", "{file}"), "the schedule deadlocks: "),
        (
            ("simulate", "1f1b", "--stage-weights", "1,2"),
            "--stage-weights has 2 values; there are 4",
        ),
        (("simulate", "1f1b", "--stage-weights", "1,x"), "--stage-weights is '1,x'"),
        (("simulate", "1f1b", "--forward", "-1"), "--forward is -1.0; accepted are numbers of at"),
        (
            ("simulate", "1f1b", "--transfer", "nan"),
            "--transfer is nan; accepted are numbers of at",
        ),
        (
            ("simulate", "1f1b", "--forward", "0", "--input", "0", "--weight", "0"),
            "--forward is 0, and so are input, weight and host; one must be longer",
        ),
        *(
            (
                ("simulate", "1f1b", "--stage-weights", f"1,1,1,{weight}"),
                f"--stage-weights is '1,1,1,{weight}'; it must be numbers above 0, such as ",
            )
            for weight in ("-1", "0", "inf", "nan")
        ),
        (("check", "1f1b", "--bound", "nan"), "--bound is nan; it must be a finite number"),
        (("check", "{folder}"), "schedule is '{folder}', which is a folder"),
    ],
)
def test_a_mistake_is_one_sentence(stepgauge, tmp_path, arguments, words):
    path = tmp_path / "stuck.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    status, _, err = stepgauge(
        "schedule", *(word.format(file=path, folder=tmp_path) for word in arguments)
    )
    assert status == 2
    assert err.startswith(f"stepgauge: {words.format(file=path, folder=tmp_path)}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["ranks", "microbatches", "per-rank"])
def test_a_count_of_zero_is_refused(stepgauge, option):
    status, out, err = stepgauge("schedule", "show", "interleaved", f"--{option}", "0")
    assert status != 0 and not out
    assert f"--{option} is 0; it must be at least 1" in err


def test_the_columns_of_the_tables_are_defined_in_the_help(stepgauge):
    for command in ("check", "simulate"):
        text = " ".join(stepgauge("schedule", command, "--help")[1].split())
        for column in ("most held", "in flight", "W pending"):
            assert column in text, (command, column)
    text = " ".join(stepgauge("bench", "pipeline", "--help")[1].split())
    assert "busy ms the mean over ranks" in text and "resident peak GiB is the most" in text
