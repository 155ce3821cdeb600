"""Tables and sentences in a terminal and in a file."""

import pytest

from stepgauge.cli import console
from stepgauge.report.table import Table

FIGURES = tuple(f"figure {i} ms" for i in range(8))


@pytest.fixture
def terminal(monkeypatch, capsys):
    """terminal(width) simulates a terminal and returns a function that gives the lines printed since."""

    def make(width):
        class Narrow(console.Output):
            def __init__(self, **settings):
                super().__init__(
                    **({"width": width} | settings), force_terminal=True, color_system=None
                )

        monkeypatch.setattr(console, "Output", Narrow)
        return lambda: [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return make


def table(rows=2, **more):
    cells = [
        [f"row{r}", *(f"{1000 * r + i:,}.5" for i in range(len(FIGURES)))] for r in range(rows)
    ]
    return Table(
        ["name", *FIGURES], cells, numeric=frozenset(FIGURES), caption="what they share", **more
    )


@pytest.mark.parametrize(("width", "shown"), [(30, 2), (44, 4), (80, 8)])
def test_columns_that_fit_are_shown_whole(terminal, width, shown):
    printed = terminal(width)
    console.print_table(table())
    lines = printed()
    assert lines[0] == "what they share" and max(map(len, lines[:5])) <= width
    rows = [line.split() for line in lines[3:5]]
    assert rows[0][0] == "row0" and rows[1] == list(table().rows[1][: 1 + shown])


def test_columns_that_tell_rows_apart_are_shown_before_figures(terminal):
    """Two rows of a plan looked alike in 80 columns: they differed in a column that was left out."""
    columns = ["name", "first figure ms", "second figure ms", "batch", "accumulation", "mode"]
    rows = [
        ["dp2", 1.5, 2.5, 4, 1, "none"],
        ["dp2", 3.5, 4.5, 4, 1, "full"],
        ["tp2", 5, 6, 2, 2, "full"],
    ]
    named = Table(columns, rows, names=1, keys=("name", "batch", "accumulation", "mode"))
    printed = terminal(30)
    console.print_table(named)
    lines = printed()
    assert [line.split() for line in lines[2:5]] == [
        ["dp2", "1.500", "none"], ["dp2", "3.500", "full"], ["tp2", "5", "full"],
    ]  # fmt: skip
    assert "has more: second figure ms, batch, accumulation" in " ".join(lines)
    console.print_table(named, complete="json")
    assert "--format json has more:" in " ".join(printed())


def remarked(*remarks):
    whole = table(rows=len(remarks))
    rows = [[*row, remark] for row, remark in zip(whole.rows, remarks, strict=True)]
    return Table([*whole.columns, "remark"], rows, frozenset(FIGURES))


def test_in_a_narrow_terminal_remarks_are_printed_below_the_table(terminal):
    printed = terminal(80)
    console.print_table(remarked("out of memory", "", "disturbed", "disturbed"))
    lines = printed()
    assert max(map(len, lines)) <= 80 and lines[2].split() == list(table().rows[0])
    assert lines[6:] == ["row0: out of memory", "row2; row3: disturbed"]
    console.print_table(remarked("out of memory", "disturbed"))
    assert printed()[-1] == "row1: disturbed"


def test_a_remark_below_the_table_names_its_row_by_the_columns_that_tell_rows_apart(terminal):
    columns = ["size", "context length", "batch", "step ms", "remark"]
    rows = [
        ["nano", 128, 4, 1.5, "disturbed: p90 is over 1.5 × p10"],
        ["nano", 64, 2, 2.5, "memory ran out at 2.50 GiB more"],
    ]
    printed = terminal(62)
    console.print_table(Table(columns, rows, numeric=frozenset({"step ms"}), names=3))
    assert printed()[-2:] == [
        "context length 128, batch 4: disturbed: p90 is over 1.5 × p10",
        "context length 64, batch 2: memory ran out at 2.50 GiB more",
    ]


def test_a_remark_of_all_rows_is_printed_once(terminal, capsys):
    shared = remarked("disturbed; slow machine", "slow machine", "slow machine; short")
    printed = terminal(200)
    console.print_table(shared)
    lines = printed()
    assert lines[-1] == "slow machine" and "\n".join(lines).count("slow machine") == 1
    assert lines[2].endswith("disturbed") and lines[4].endswith("short")
    assert shared.to("markdown").endswith("| short |\n\nslow machine\n")
    assert shared.to("csv").count("slow machine") == 3
    console.print_table(remarked("slow machine"))
    assert "remark" not in "\n".join(printed())


WIDE_NAMES = ["a-name-of-twenty-six-letters", "torch-ddp-views", "reduce-overhead", "GiB of it"]


def wide_table():
    """Returns a table of 260 columns of text, of which the names take 70."""
    head = ["name", "wrapper", "compile mode", "unit", *FIGURES, "remark"]
    cells = [
        [*WIDE_NAMES, *["1,234.5"] * len(FIGURES), "device memory ran out " * 5],
        ["b", *WIDE_NAMES[1:], *["1,234.5"] * len(FIGURES), ""],
    ]
    return Table(head, cells, numeric=frozenset(FIGURES), names=4)


@pytest.mark.parametrize("columns", ["", "0", "wide", "400"])
def test_in_a_file_a_table_has_all_columns_and_each_row_is_a_line(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    console.print_table(wide_table())
    lines = capsys.readouterr().out.splitlines()
    *headings, first, second = lines
    assert headings[-1].endswith("remark") and "more" not in "".join(lines)
    assert [*WIDE_NAMES[:3]] == first.split()[:3] and first.endswith(" ran out")
    assert first.count("1,234.5") == second.count("1,234.5") == len(FIGURES)
    assert second.endswith("1,234.5"), "spaces up to the width of the table help nobody"


@pytest.mark.parametrize("columns", [30, 44, 60, 80, 100, 120])
def test_in_a_file_no_table_is_wider_than_columns(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    console.print_table(wide_table())
    drawn, _, below = capsys.readouterr().out.partition(": device memory")
    assert max(map(len, drawn.splitlines()[:-1])) <= columns  # the last begins the remark
    assert drawn.count("1,234.5") >= 2 and "--format csv or json has more: " in below


def test_a_remark_wraps_and_figures_do_not(terminal):
    printed = terminal(60)
    remarked = Table(
        ["name", "step ms", "remark"],
        [["row0", "1.5", "device memory ran out " * 4], ["row1", "2.5", ""]],
        frozenset(["step ms"]),
    )
    console.print_table(remarked)
    lines = printed()
    assert max(map(len, lines)) <= 60
    assert lines[-3].startswith("row0   1.5") and lines[-2].startswith("            device")


def test_long_names_fold_to_half_of_the_width_and_nothing_is_cut(terminal):
    printed = terminal(40)
    names = ["blocks.0.feed_forward.gate_up.weight", "blocks.11.attention.output.weight"]
    console.print_table(
        Table(["name", *FIGURES], [[name, *["1,234.5"] * 8] for name in names], frozenset(FIGURES))
    )
    text = "\n".join(printed())
    assert max(map(len, text.splitlines())) <= 40 and text.count("1,234.5") == 4
    columns = "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert all(name in columns for name in names)


def test_figures_that_name_rows_are_shown_first(terminal):
    printed = terminal(40)
    cells = [["all_reduce", str(size), *["1,234.5"] * len(FIGURES)] for size in (512, 1024)]
    console.print_table(
        Table(["op", "size B", *FIGURES], cells, frozenset(["size B", *FIGURES]), names=2)
    )
    assert [line.split()[:3] for line in printed()[2:4]] == [
        ["all_reduce", "512", "1,234.5"],
        ["all_reduce", "1024", "1,234.5"],
    ]


@pytest.mark.parametrize("width", [9, 12, 16, 20])
def test_no_figure_is_cut_in_a_narrow_terminal(terminal, width):
    printed = terminal(width)
    cells = [["row0", "123,456.7 – 234,567.8", "absent because of it"]]
    console.print_table(Table(["name", "step ms", "dot"], cells, frozenset(["step ms", "dot"])))
    text = "".join(printed())
    assert "123,456.7 – 234,567.8" in text and "absent because of it" in text


def test_cells_are_not_read_as_markup(terminal):
    printed = terminal(80)
    console.print_table(Table(["name"], [["a[/b] [red]c"]]))
    assert printed()[-1] == "a[/b] [red]c"


def test_names_wider_than_the_terminal_fold_and_figures_that_do_not_fit_are_left_out(terminal):
    printed = terminal(30)
    console.print_table(Table(["name", *FIGURES], [["n" * 40, *["1.5"] * 8]], frozenset(FIGURES)))
    lines = printed()
    assert (
        max(map(len, lines)) <= 30 and "".join(line.split()[0] for line in lines[2:5]) == "n" * 40
    )
    assert lines[2].endswith("1.5") and "--format csv or json has more: figure" in " ".join(lines)


def test_no_word_of_a_name_is_broken_if_it_fits(terminal):
    printed = terminal(80)
    head, row = ["size", "layout", "precision"], ["net.py:make", "dp2 zero3 pp2 1f1b m8", "fp32"]
    figures = [f"figure {i} ms" for i in range(5)]
    console.print_table(Table([*head, *figures], [[*row, *["1,234.5"] * 5]], frozenset(figures)))
    lines = printed()
    assert max(map(len, lines)) <= 80 and "net.py:make" in lines[2].split()


@pytest.mark.parametrize(("width", "names"), [(60, 4), (120, 8)])
def test_of_many_naming_columns_those_that_fit_are_shown(terminal, width, names):
    printed = terminal(width)
    head = [f"field_{n:02}_name" for n in range(30)]
    console.print_table(
        Table([*head, "step ms"], [[*(f"v{n}" for n in range(30)), "1.5"]], frozenset(["step ms"]))
    )
    lines = printed()
    assert max(map(len, lines[:3])) <= width
    assert lines[2].split() == [*(f"v{n}" for n in range(names)), "1.5"]
    assert "field_29_name" in "".join(lines[3:])


def test_the_naming_column_that_tells_rows_apart_is_shown(terminal):
    """Rows of two machines looked alike: of many naming columns, the last were left out."""
    printed = terminal(60)
    head = [*(f"field_{n:02}_name" for n in range(8)), "measured on"]
    rows = [[*(f"v{n}" for n in range(8)), machine, ms] for machine, ms in (("A", 1.5), ("B", 2.5))]
    console.print_table(Table([*head, "step ms"], rows, frozenset(["step ms"])))
    assert [line.split()[-2:] for line in printed()[2:4]] == [["A", "1.500"], ["B", "2.500"]]


def test_a_wide_text_after_the_figures_is_left_out(terminal):
    printed = terminal(60)
    row = ["aten::mm", "325.5", "called inside of another operation " * 2]
    console.print_table(Table(["operation", "step ms", "rule"], [row], frozenset(["step ms"])))
    assert printed()[2:] == ["aten::mm   325.5", "--format csv or json has more: rule"]


def test_names_wider_together_than_the_terminal_wrap_in_half_of_it(terminal):
    printed = terminal(56)
    row = ["aten::linear_of_a_wide_layer", "4x512x1024, 1024x4096, 4096", "1,234.5"]
    console.print_table(Table(["operation", "shapes", "step ms"], [row], frozenset(["step ms"])))
    text = printed()
    assert max(map(len, text)) <= 56 and "1,234.5" in text[2]


def test_columns_that_the_caption_states_are_only_for_machines():
    told = table(hidden=frozenset(["name"]))
    assert told.for_display().columns == list(FIGURES) and "name" in told.to("csv")


def test_sentences_wrap_with_an_indent_in_a_terminal(terminal):
    message = "weights gathered over 16 ranks take no longer than computing"
    printed = terminal(30)
    console.print_points("What hides", [message, "short"])
    lines = printed()
    assert lines[1] == "What hides" and lines[-1] == "  short" and max(map(len, lines)) <= 30
    assert lines[2].startswith("  w") and all(line.startswith("    ") for line in lines[3:-1])
    assert " ".join(" ".join(lines[2:-1]).split()) == message


def test_sentences_in_a_file_are_one_line_each(capsys):
    console.print_points("What hides", ["word " * 60])
    assert len(capsys.readouterr().out.splitlines()) == 3
