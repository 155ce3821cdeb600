"""Renders sections as one self-contained HTML file that loads nothing from elsewhere."""

import base64
import dataclasses
import gzip
import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.findings import Finding
from stepgauge.report.numbers import number
from stepgauge.report.table import FORMATS, Table
from stepgauge.spec.store import StoreError
from stepgauge.spec.whole_file import write_whole


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclasses.dataclass(frozen=True)
class Plot:
    """An SVG from report.figure with a caption."""

    svg: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Flame:
    """A flame graph to zoom and search. The tree is nested [name, own µs, children], summed over
    `steps` steps.
    """

    tree: Sequence[Any]
    steps: int
    caption: str


@dataclasses.dataclass(frozen=True)
class OtherMachine:
    """Results of another machine, marked as such."""

    title: str
    answer: str
    blocks: Sequence["Block"]


NOTHING_FOUND = (
    "<p>No change is recommended: no two undisturbed rows of bench step or of bench data-parallel on "
    "GPUs differ only in one choice and by more than their spread. Layouts and schedules are compared "
    "in their own sections below.</p>"
)
UNCONFIRMED = "Not confirmed"
WHY_UNCONFIRMED = (
    "These rows were not measured in turns. Before you rely on a finding, run its command: it "
    "measures both variants in turns."
)
LONG = 24  # characters: cells with more may wrap
Block = Text | Plot | Table | Flame | OtherMachine


@dataclasses.dataclass(frozen=True)
class Section:
    """One section. `answer` is computed from its rows. `reason` says why it is only listed at the end
    of the page. `problem` is a sentence for the terminal if it was measured and cannot be drawn.
    """

    title: str
    question: str
    blocks: Sequence[Block] = ()
    answer: str = ""
    method: str = ""
    reason: str = ""
    problem: str = ""

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page. `findings` come first; with None there is no such section."""

    title: str
    sections: Sequence[Section]
    facts: Mapping[str, str]
    findings: Sequence[Finding] | None = None

    def html(self) -> str:
        """Returns the HTML document."""
        shown = [section for section in self.sections if not section.reason]
        left_out = [section for section in self.sections if section.reason]
        return _resource("page.html").format(
            title=html.escape(self.title),
            style=_resource("page.css"),
            script=_resource("page.js"),
            navigation="".join(map(_link, shown)),
            findings="" if self.findings is None else _findings(self.findings),
            facts="".join(
                f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.facts.items()
            ),
            sections="".join(map(_section, shown)),
            left_out=_left_out(left_out),
        )

    def write(self, path: Path) -> Path:
        """Writes the HTML document and returns its path. Raises StoreError if that fails; an earlier
        document then stays.
        """
        try:
            write_whole(path, self.html())
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from None
        return path


def _resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _link(section: Section) -> str:
    return f'<a href="#{section.anchor}">{html.escape(section.title)}</a>'


def _findings(findings: Sequence[Finding]) -> str:
    confirmed = [finding for finding in findings if finding.is_confirmed]
    unconfirmed = [finding for finding in findings if not finding.is_confirmed]
    shown = f"<ol>{''.join(map(_finding, confirmed))}</ol>" if confirmed else ""
    if unconfirmed:
        shown += f"<h3>{UNCONFIRMED}</h3><p>{WHY_UNCONFIRMED}</p>"
        shown += f"<ul>{''.join(map(_finding, unconfirmed))}</ul>"
    return f'<section id="findings"><h2>What to change first</h2>{shown or NOTHING_FOUND}</section>'


def _finding(finding: Finding) -> str:
    saves = "saves" if finding.is_confirmed else "may save"
    title = f"{finding.title} {saves} {number(finding.saved_ms)} ms per step"
    command = html.escape(finding.command)
    return (
        f"<li><b>{html.escape(title)}</b><p>{html.escape(finding.text)}</p>"
        f'<div class="command"><code>{command}</code>'
        f'<button data-copy="{command}">copy</button></div></li>'
    )


def _section(section: Section) -> str:
    blocks = "".join(map(_block, section.blocks))
    answer = f'<p class="answer">{html.escape(section.answer)}</p>' if section.answer else ""
    method = (
        "<details><summary>How this is "
        f"measured</summary><p>{html.escape(section.method)}</p></details>"
        if section.method
        else ""
    )
    return (
        f'<section id="{section.anchor}"><h2>{html.escape(section.title)}</h2>'
        f'<p class="question">{html.escape(section.question)}</p>{answer}{blocks}{method}</section>'
    )


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Plot(svg, caption):
            return (
                f'<figure class="plot" aria-label="{html.escape(caption)}">{svg}<figcaption>'
                f'{html.escape(caption)} <button class="save">save SVG</button></figcaption></figure>'
            )
        case Flame():
            return _flame(block)
        case OtherMachine(title, answer, blocks):
            return (
                f'<div class="shipped"><h3>{html.escape(title)}</h3><p>{html.escape(answer)}</p>'
                f"{''.join(map(_block, blocks))}</div>"
            )
        case Table():
            return _table(block)


def _flame(flame: Flame) -> str:
    data = json.dumps(flame.tree, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<figure class="flame" data-steps="{flame.steps}"><div class="bar"><span><input type="search" '
        'placeholder="search, e.g. norm" aria-label="Search the flame graph"> '
        '<label><input type="checkbox" class="merge"> merge repeated blocks</label> '
        '<button class="reset">show all</button></span><output></output></div><div class="rows"></div>'
        f"<figcaption>{html.escape(flame.caption)} The width of a box is its time. Click a box or "
        "press Enter to zoom in, use the arrow keys to move, press Escape to show all.</figcaption>"
        f'<script type="application/json">{data}</script></figure>'
    )


def html_table(table: Table) -> str:
    """Returns only the <table>. Figures have the class n, long texts the class long."""

    def row(tag: str, cells: Sequence[str]) -> str:
        drawn = ""
        for column, cell in zip(shown.columns, cells, strict=True):
            kind = "n" if shown.is_numeric(column) else "long" if len(cell) > LONG else ""
            drawn += f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(cell)}</{tag}>"
        return f"<tr>{drawn}</tr>"

    shown = table.for_display()
    body = "".join(row("td", cells) for cells in shown.rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in shown.notes)
    return f"<table><thead>{row('th', shown.columns)}</thead><tbody>{body}</tbody></table>{notes}"


def _table(table: Table) -> str:
    caption = html.escape(table.caption)
    copies = "".join(f'<button data-format="{name}">{name}</button>' for name in FORMATS)
    drawn = (
        f'<div class="table" data-copies="{_packed({name: table.to(name) for name in FORMATS})}">'
        f'<div class="copies"><span>{caption}</span><span>copy as {copies}</span></div>'
        f'<div class="scroll">{html_table(table)}</div></div>'
    )
    if not table.folded:
        return drawn
    return f"<details><summary>{caption.partition('. ')[0]}</summary>{drawn}</details>"


def _packed(texts: Mapping[str, str]) -> str:
    """Returns the table in all formats, compressed to a tenth. The page's script unpacks it when the
    user copies it.
    """
    return base64.b64encode(gzip.compress(json.dumps(texts).encode(), mtime=0)).decode()


def _left_out(sections: Sequence[Section]) -> str:
    if not sections:
        return ""
    items = "".join(
        f"<li><b>{html.escape(s.title)}</b>: {html.escape(s.reason)}</li>" for s in sections
    )
    return f'<section id="not-run"><h2>Not in this run</h2><ul>{items}</ul></section>'
