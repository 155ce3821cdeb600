"""A table of texts, and the formats that it prints in."""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of texts.

    numeric  columns that are aligned right
    said     columns that people need not read: the caption or another column says it, or it is as
             usual in all rows. They are in csv and JSON; markdown, LaTeX and Typst have the caption
    names    how many of the first columns name the rows; None: those before the first number
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()
    caption: str = ""
    folded: bool = False  # shown in the report only when opened
    said: frozenset[str] = frozenset()
    names: int | None = None

    def to(self, name: str) -> str:
        """The table as text of one of FORMATS."""
        return FORMATS[name](self)

    def naming(self) -> range:
        """The columns that name the rows."""
        numbers = (place for place, column in enumerate(self.columns) if column in self.numeric)
        return range(next(numbers, len(self.columns)) if self.names is None else self.names)

    def for_eyes(self) -> "Table":
        return self.of(
            [place for place, column in enumerate(self.columns) if column not in self.said]
        )

    def of(self, places: Sequence[int]) -> "Table":
        """Some of the columns."""
        columns, *rows = (
            [cells[place] for place in places] for cells in (self.columns, *self.rows)
        )
        names = None if self.names is None else sum(place < self.names for place in places)
        return dataclasses.replace(self, columns=columns, rows=rows, names=names)


def _for_machines(table: Table) -> list[list[str]]:
    """The rows, numbers without separators of thousands."""
    return [
        [
            cell.replace(",", "") if column in table.numeric else cell
            for cell, column in zip(row, table.columns, strict=True)
        ]
        for row in table.rows
    ]


def objects(table: Table) -> list[dict[str, Any]]:
    """One a row, by column; in numeric columns numbers are numbers, and null is where there is
    none.
    """
    return [
        {
            column: _value(cell) if column in table.numeric else cell
            for column, cell in zip(table.columns, row, strict=True)
        }
        for row in _for_machines(table)
    ]


def _value(cell: str) -> int | float | str | None:
    if not _NUMBER.fullmatch(cell):
        return cell or None
    return float(cell) if "." in cell else int(cell)


def _json(table: Table) -> str:
    """A list of objects, one a row."""
    return json.dumps(objects(table), indent=1, ensure_ascii=False) + "\n"


def _csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.columns, *_for_machines(table)])
    return text.getvalue()


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    table = table.for_eyes()
    rule = ["---:" if column in table.numeric else "---" for column in table.columns]
    above = [table.caption, ""] if table.caption else []
    return "\n".join([*above, line(table.columns), line(rule), *map(line, table.rows)]) + "\n"


_LATEX_ESCAPES = str.maketrans(
    {**{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "–": "--", "µ": r"\textmu{}"}
)  # fmt: skip


def _latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_LATEX_ESCAPES) for cell in cells) + r" \\"

    table = table.for_eyes()
    align = "".join("r" if column in table.numeric else "l" for column in table.columns)
    body = [line(table.columns), r"\midrule", *map(line, table.rows)]
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
    return _comment("%", table) + "\n".join(lines) + "\n"


_TYPST_ESCAPES = str.maketrans({c: f"\\{c}" for c in "\\#$*_[]<>@`~/"})


def _typst(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "  " + ", ".join(f"[{cell.translate(_TYPST_ESCAPES)}]" for cell in cells) + ","

    table = table.for_eyes()
    align = ", ".join("right" if column in table.numeric else "left" for column in table.columns)
    head = ["#table(", f"  columns: {len(table.columns)},", f"  align: ({align},),"]
    header = f"  table.header({line(table.columns).strip().rstrip(',')}),"
    return _comment("//", table) + "\n".join([*head, header, *map(line, table.rows), ")"]) + "\n"


def _comment(mark: str, table: Table) -> str:
    """The caption where it can be taken over into one."""
    return f"{mark} {table.caption}\n" if table.caption else ""


FORMATS: Mapping[str, Callable[[Table], str]] = {
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
    "typst": _typst,
}
