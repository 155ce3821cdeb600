"""Fits a table into a width: which columns are shown, how wide each is, and what goes below."""

from collections.abc import Sequence

from rich.cells import cell_len

from stepgauge.report.table import REMARK, Table

GAP = 2  # characters between columns
REMARK_WIDTH = 32  # a remark column narrower than this is moved below the table
WRAPPED_WIDTH = 12  # the least width of a naming column that wraps


def columns_that_fit(table: Table, width: int) -> Table | None:
    """Returns the table with the columns that fit: those that name the rows or tell them apart, then
    figures from the left, and the remark if there is still room. None if no column fits next to the
    names.

    Names that take more than half of the width wrap; if even that is too wide, naming columns are left
    out, first those without which all rows can still be told apart.
    """
    widths = [_natural_width(table, place) + GAP for place in range(len(table.columns))]
    first = table.name_columns().stop
    names = _names_that_fit(table, widths[:first], width)
    others = sorted(range(first, len(widths)), key=lambda place: table.columns[place] == REMARK)
    needed = _telling_apart(table, names)
    name_width = sum(widths[place] for place in names)
    used = min(name_width, width // 2) - GAP + sum(widths[place] for place in needed)
    chosen = [*names, *needed]
    for place in (place for place in others if place not in needed):
        used += widths[place]
        if used > width:
            break
        chosen.append(place)
    return None if others and len(chosen) == len(names) else table.select(sorted(chosen))


def _telling_apart(table: Table, names: Sequence[int]) -> list[int]:
    """Returns the positions of the keys that tell rows apart and are not among the names, as few as
    possible.
    """
    keys = [place for place, column in enumerate(table.columns) if column in table.keys]
    needed = keys
    for place in reversed([place for place in keys if place not in names]):
        rest = [other for other in needed if other != place]
        if _num_different(table, rest) == _num_different(table, keys):
            needed = rest
    return [place for place in needed if place not in names]


def _num_different(table: Table, places: Sequence[int]) -> int:
    return len({tuple(row[place] for place in places) for row in table.rows})


def _names_that_fit(table: Table, widths: Sequence[int], width: int) -> list[int]:
    """Returns the positions of the naming columns that fit, unwrapped or wrapped in half of the width."""
    names = list(range(len(widths)))
    while len(names) > 1 and sum(widths[place] for place in names) > width:
        if sum(min(widths[place], WRAPPED_WIDTH + GAP) for place in names) <= width // 2:
            break
        names.remove(_least_needed(table, names))
    return names


def _least_needed(table: Table, names: Sequence[int]) -> int:
    """Returns the last naming column, but the first, that tells no rows apart; the last if all do."""
    different = _num_different(table, names)
    for place in reversed(names[1:]):
        if _num_different(table, [other for other in names if other != place]) == different:
            return place
    return names[-1]


def _natural_width(table: Table, place: int) -> int:
    column = table.columns[place]
    texts = (*heading_lines(table, column), *(row[place] for row in table.rows))
    widest = max(map(cell_len, texts))
    return min(widest, REMARK_WIDTH) if column == REMARK else widest


def heading_lines(table: Table, column: str) -> list[str]:
    """Returns the lines of a column's heading: several for figures, whose columns are narrow."""
    if not table.is_numeric(column):
        return [column]
    return column.split(" ", 2 if "p10" in column else 1)


def column_widths(table: Table, width: int) -> list[int]:
    """Returns a width for each column so that all fit. The widest text column shrinks first, and
    none below its longest word, unless there is no other way.
    """
    widths, least = [], []
    for column, *cells in zip(table.columns, *table.rows, strict=True):
        texts = [*heading_lines(table, column), *cells]
        pieces = texts if table.is_numeric(column) else " ".join(texts).split()
        widths.append(max(map(cell_len, texts)))
        least.append(max(map(cell_len, pieces), default=0))
    room = width - GAP * (len(widths) - 1)
    _shrink(widths, least, room)
    least = [
        each if table.is_numeric(name) else 1
        for name, each in zip(table.columns, widths, strict=True)
    ]
    _shrink(widths, least, room)
    return widths


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Narrows the widest column that is above its least width, until all fit or none can shrink."""
    while sum(widths) > room:
        wide = [place for place, each in enumerate(widths) if each > least[place]]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def remark_lines(table: Table) -> list[str]:
    """Returns a line for each different remark, after the names of its rows; for a table whose
    remark column does not fit.
    """
    place = list(table.columns).index(REMARK)
    every = list(table.name_columns())
    naming = [n for n in every if _num_different(table, [n]) > 1] or every
    rows_by_remark: dict[str, list[str]] = {}
    for row in table.rows:
        values = [f"{table.columns[n]} {row[n]}" for n in naming if row[n]]
        name = row[naming[0]] if len(naming) == 1 else ", ".join(values)
        rows_by_remark.setdefault(row[place], []).append(name)
    return [f"{'; '.join(rows)}: {remark}" for remark, rows in rows_by_remark.items() if remark]
