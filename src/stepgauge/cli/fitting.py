"""Which columns of a table fit into a width, how wide each is drawn, and what stands below it."""

from collections.abc import Sequence

from rich.cells import cell_len

from stepgauge.report.table import REMARK, Table

GAP = 2  # between columns
REMARK_WIDTH = 32  # at least, where it has a column
WRAPPED = 12  # of a name, at least, where names wrap


def that_fit(table: Table, width: int) -> Table | None:
    """The columns that name the rows and as many figures as fit, the first ones; the remark where
    there is room beside all of them. Names over half of the width wrap; where they have no room to,
    the last ones are left out.

    None where not one column fits beside the names.
    """
    widths = [_width(table, place) + GAP for place in range(len(table.columns))]
    first = table.name_columns().stop
    names = _names_with_room(widths[:first], width)
    others = sorted(range(first, len(widths)), key=lambda place: table.columns[place] == REMARK)
    chosen, taken = list(range(names)), min(sum(widths[:names]), width // 2) - GAP
    for place in others:
        taken += widths[place]
        if taken > width:
            break
        chosen.append(place)
    return None if others and len(chosen) == names else table.select(sorted(chosen))


def _names_with_room(widths: Sequence[int], width: int) -> int:
    """How many of the naming columns fit: as they are, or wrapped in half of the width."""
    names = len(widths)
    while names > 1 and sum(widths[:names]) > width:
        if sum(min(each, WRAPPED + GAP) for each in widths[:names]) <= width // 2:
            break
        names -= 1
    return names


def _width(table: Table, place: int) -> int:
    column = table.columns[place]
    widest = max(map(cell_len, (*lines_of(table, column), *(row[place] for row in table.rows))))
    return min(widest, REMARK_WIDTH) if column == REMARK else widest


def lines_of(table: Table, column: str) -> list[str]:
    """The heading; of figures, which are narrow, in several lines."""
    if not table.is_numeric(column):
        return [column]
    return column.split(" ", 2 if "p10" in column else 1)


def column_widths(table: Table, width: int, *, may_fold: bool) -> list[int]:
    """Of each column, so that all fit in the width: the widest text gives way first. None is narrower
    than its longest word, but with `may_fold` where that is not enough.
    """
    taken, least = [], []
    for column, *cells in zip(table.columns, *table.rows, strict=True):
        texts = [*lines_of(table, column), *cells]
        pieces = texts if table.is_numeric(column) else " ".join(texts).split()
        taken.append(max(map(cell_len, texts)))
        least.append(max(map(cell_len, pieces), default=0))
    room = width - GAP * (len(taken) - 1)
    _narrow(taken, least, room)
    if may_fold:
        texts = [place for place, name in enumerate(table.columns) if not table.is_numeric(name)]
        _narrow(taken, [1 if place in texts else each for place, each in enumerate(taken)], room)
    return taken


def _narrow(taken: list[int], least: Sequence[int], room: int) -> None:
    """Makes the widest column that is over its least narrower, until all fit or none is."""
    while sum(taken) > room:
        wide = [place for place, each in enumerate(taken) if each > least[place]]
        if not wide:
            return
        taken[max(wide, key=taken.__getitem__)] -= 1


def remarks_below(table: Table) -> list[str]:
    """The remarks of a table that has no room for their column, each after the rows that it is of."""
    if REMARK not in table.columns:
        return []
    place = list(table.columns).index(REMARK)
    rows_of: dict[str, list[str]] = {}
    for row in table.rows:
        name = " ".join(row[n] for n in table.name_columns() if row[n])
        rows_of.setdefault(row[place], []).append(name)
    return [f"{', '.join(names)}: {remark}" for remark, names in rows_of.items() if remark]
