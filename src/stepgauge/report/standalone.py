"""A plot as a file of its own. On a page, its colours are variables of page.css; a file needs their
values.
"""

import functools
import importlib.resources
import re
from collections.abc import Mapping

BACKGROUND = "card"
VARIABLE = r"var\(--([\w-]+)\)"


@functools.cache
def palette() -> Mapping[str, tuple[str, str]]:
    """Returns the (light, dark) value of each colour of the page's style."""
    style = (importlib.resources.files("stepgauge.report") / "page.css").read_text("utf-8")
    colours = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", style)
    return {name: (light, dark) for name, light, dark in colours}


def standalone(svg: str) -> str:
    """Returns a plot of report.figure as a file's content: with a size, a background, and the colours
    that it uses, which follow the light or dark scheme of the reader.

    Programs that know no CSS variables, such as Inkscape, show the light colours.
    """
    svg = svg.replace("var(--sans)", "sans-serif")
    used = sorted({*re.findall(VARIABLE, svg), BACKGROUND})
    light, dark = ("".join(f" --{name}: {palette()[name][i]};" for name in used) for i in (0, 1))
    background = f'<rect width="100%" height="100%" style="fill: var(--{BACKGROUND})"/>'
    head = (
        f"<style>svg {{ background: var(--{BACKGROUND});{light} }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{{dark} }} }}</style>{background}"
    )
    svg = re.sub(r"<svg[^>]*>", lambda tag: _with_size(tag[0]) + head, svg, count=1)
    return re.sub(r'style="([^"]*)"', _with_plain_colours, svg)


def _with_size(tag: str) -> str:
    """Adds the size of the drawing to the <svg> tag, so that a reader can zoom and scroll."""
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', tag)[0]
    return f'{tag[:-1]} width="{width}pt" height="{height}pt">'


def _with_plain_colours(style: re.Match[str]) -> str:
    """Puts the light colours before a style as attributes. The style overrides them where variables
    are known.
    """
    colours = re.findall(rf"\b(fill|stroke): {VARIABLE}", style[1])
    plain = "".join(f'{what}="{palette()[name][0]}" ' for what, name in colours)
    return plain + style[0]
