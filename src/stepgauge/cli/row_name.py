"""Names of rows in a progress bar, which has less room than they may need."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions
from rich.progress import ProgressColumn, Task
from rich.text import Text

CUT = "…"


def telling_places(names: Iterable[str]) -> dict[str, int]:
    """Returns where the word begins that tells each name from the one most like it."""
    ordered = sorted(set(names), key=str.split)
    places = dict.fromkeys(ordered, 0)
    for pair in itertools.pairwise(ordered):
        words = zip(*map(str.split, pair), strict=False)
        same = itertools.takewhile(lambda two: two[0] == two[1], words)
        place = sum(len(word) + 1 for word, _ in same)
        for name in pair:
            places[name] = max(places[name], place)
    return places


def fitted(text: str, place: int, width: int) -> str:
    """Returns the text in so many characters, with the word that begins at the place in any case."""
    if len(text) <= width:
        return text
    end = place + len(text[place:].partition(" ")[0])
    if end < width:
        return text[: width - 1] + CUT
    after = CUT if end < len(text) else ""
    return CUT + text[end + 1 + len(after) - width : end] + after


class Description(ProgressColumn):
    """The description of a task, shortened so that its field `place` is seen if it has one."""

    def render(self, task: Task) -> "_Shortened":
        return _Shortened(task.description, task.fields.get("place", 0))


@dataclasses.dataclass(frozen=True)
class _Shortened:
    text: str
    place: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        text = fitted(self.text, self.place, options.max_width)
        yield Text(text, no_wrap=True, overflow="ellipsis", end="")
