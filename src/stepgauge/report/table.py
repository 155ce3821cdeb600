"""A table of values and the formats that it can be written in.

Tables hold unrounded values. A displayed table rounds them to four digits; CSV and JSON do not.
"""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stepgauge.report.numbers import Doubtful, number

REMARK = "remark"  # the column with notes on a row
SEPARATOR = "; "  # between the notes of one remark
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


class Range(NamedTuple):
    """A cell of two figures: written "9.0 – 11.0", a list of two in JSON."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of values. A value is a text, a number, a Range or None.

    numeric  columns of figures, which are aligned right; None: every column that holds a number
    formats  format specs for columns that do not have four digits: {"ratio": ".3f"}
    hidden   columns that are not displayed, because the caption or another column has their value;
             CSV and JSON have them
    names    the number of columns, from the left, that name the rows; None: all before the first
             figure
    keys     columns that say together what a row is; as many as tell rows apart are displayed before
             figures
    folded   True if the report shows the table only when it is opened
    absent   the text displayed for a missing figure
    notes    sentences below the table; for_display adds remarks that all rows share
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numeric: frozenset[str] | None = None
    caption: str = ""
    folded: bool = False
    hidden: frozenset[str] = frozenset()
    names: int | None = None
    keys: Sequence[str] = ()
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: str = ""
    notes: Sequence[str] = ()

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], **fields: Any) -> "Table":
        """Returns a table of rows given as dicts. Columns come in the order in which they first appear;
        a missing value is None.
        """
        columns = list(dict.fromkeys(column for row in rows for column in row))
        return cls(columns, [[row.get(column) for column in columns] for row in rows], **fields)

    def is_numeric(self, column: str) -> bool:
        if self.numeric is not None:
            return column in self.numeric
        place = list(self.columns).index(column)
        return any(_is_figure(row[place]) for row in self.rows)

    def to(self, name: str) -> str:
        """Returns the table as text in one of FORMATS."""
        return FORMATS[name](self)

    def name_columns(self) -> range:
        """Returns the positions of the columns that name the rows."""
        figures = (place for place, column in enumerate(self.columns) if self.is_numeric(column))
        return range(next(figures, len(self.columns)) if self.names is None else self.names)

    def for_display(self) -> "Table":
        """Returns the table as it is displayed: all cells are texts, hidden and empty columns are left
        out, and remarks that all rows share become notes below the table.
        """
        table = self._without_shared_remarks()
        numeric = frozenset(filter(table.is_numeric, table.columns))
        texts = [
            [
                _text(cell, self.formats.get(column, ""), is_numeric=column in numeric)
                if cell is not None
                else (self.absent if column in numeric else "")
                for cell, column in zip(row, table.columns, strict=True)
            ]
            for row in table.rows
        ]
        empty = {
            name
            for place, name in enumerate(table.columns)
            if table.rows and all(row[place] is None for row in table.rows)
        }
        left_out = self.hidden | empty
        shown = [place for place, name in enumerate(table.columns) if name not in left_out]
        return dataclasses.replace(table, rows=texts, numeric=numeric).select(shown)

    def _without_shared_remarks(self) -> "Table":
        """Returns the table with remarks that all rows share as one note."""
        if REMARK not in self.columns or not self.rows:
            return self
        place = list(self.columns).index(REMARK)
        remarks = [str(row[place] or "").split(SEPARATOR) for row in self.rows]
        shared = [part for part in remarks[0] if part and all(part in parts for parts in remarks)]
        own = [SEPARATOR.join(part for part in parts if part not in shared) for parts in remarks]
        rows = [
            [*row[:place], remark or None, *row[place + 1 :]]
            for row, remark in zip(self.rows, own, strict=True)
        ]
        notes = [*self.notes, *filter(None, [SEPARATOR.join(shared)])]
        return dataclasses.replace(self, rows=rows, notes=notes)

    def select(self, places: Sequence[int]) -> "Table":
        """Returns a table of the columns at these positions."""
        columns = [self.columns[place] for place in places]
        rows = [[row[place] for place in places] for row in self.rows]
        names = self.names
        if names is not None:
            names = len([place for place in places if place < names])
        return dataclasses.replace(self, columns=columns, rows=rows, names=names)


def _is_figure(cell: object) -> bool:
    return isinstance(cell, int | float | Range) and not isinstance(cell, bool)


def _text(cell: Any, form: str, *, is_numeric: bool) -> str:
    """Returns a cell as it is displayed. In a column of figures, integers have thousands separators."""
    if isinstance(cell, Range):
        return " – ".join(_text(end, form, is_numeric=is_numeric) for end in cell)
    if not _is_figure(cell) or not is_numeric:
        return str(cell)
    mark = "†" if isinstance(cell, Doubtful) else ""
    if form:
        return f"{cell:{form}}{mark}"
    return f"{cell:,}" if isinstance(cell, int) else number(cell) + mark


def _machine_value(cell: Any, *, is_numeric: bool) -> Any:
    """Returns a cell as a JSON value. A text of digits in a column of figures becomes a number."""
    if isinstance(cell, Range):
        return list(cell)
    if not is_numeric or not isinstance(cell, str):
        return cell
    digits = cell.replace(",", "")
    if not _NUMBER.fullmatch(digits):
        return cell or None
    return float(digits) if "." in digits else int(digits)


def objects(table: Table) -> list[dict[str, Any]]:
    """Returns each row as a dict by column, in full precision. A missing figure is None."""
    numeric = set(filter(table.is_numeric, table.columns))
    return [
        {
            column: _machine_value(cell, is_numeric=column in numeric)
            for column, cell in zip(table.columns, row, strict=True)
        }
        for row in table.rows
    ]


def _json(table: Table) -> str:
    return json.dumps(objects(table), indent=1, ensure_ascii=False) + "\n"


def _csv(table: Table) -> str:
    """Returns full precision. A Range is written "low – high"."""

    def cell(value: Any) -> Any:
        return " – ".join(map(str, value)) if isinstance(value, list) else value

    text = io.StringIO()
    rows = [[cell(value) for value in row.values()] for row in objects(table)]
    csv.writer(text, lineterminator="\n").writerows([table.columns, *rows])
    return text.getvalue()


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    table = table.for_display()
    rule = ["---:" if table.is_numeric(column) else "---" for column in table.columns]
    above = [table.caption, ""] if table.caption else []
    drawn = [line(table.columns), line(rule), *map(line, table.rows)] if table.columns else []
    below = [text for note in table.notes for text in ("", note)]
    return "\n".join([*above, *drawn, *below]) + "\n"


_LATEX_ESCAPES = str.maketrans(
    {**{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "–": "--", "µ": r"\textmu{}"}
)  # fmt: skip


def _latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_LATEX_ESCAPES) for cell in cells) + r" \\"

    table = table.for_display()
    align = "".join("r" if table.is_numeric(column) else "l" for column in table.columns)
    body = [line(table.columns), r"\midrule", *map(line, table.rows)]
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
    comment = f"% {table.caption}\n" if table.caption else ""
    notes = "".join(f"% {note}\n" for note in table.notes)
    return comment + "\n".join(lines) + "\n" + notes


FORMATS: Mapping[str, Callable[[Table], str]] = {
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}
