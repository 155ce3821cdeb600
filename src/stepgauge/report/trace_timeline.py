"""The timeline of one or many ranks' traces as a part of a page: streams above each other, zoomed and
searched by the page itself.
"""

import html
import importlib.resources
import json
from collections.abc import Sequence

from stepgauge.report.kernel_names import shortened
from stepgauge.spec.analysis import KINDS, Timeline

LONGEST_NAME = 160
UNIT = 10  # numbers of a timeline to a µs
STYLE = (
    ".trace-timeline{position:relative}"
    ".trace-timeline .bar{gap:1rem;flex-wrap:wrap;font-size:.88rem}"
    ".trace-timeline .tip{position:absolute;z-index:1;max-width:34rem;padding:.15rem .5rem;font-size:.8rem;"
    "pointer-events:none;overflow-wrap:anywhere;color:var(--ink);background:var(--card);border:1px solid var(--grid)}"
    ".trace-timeline canvas{display:block;width:100%;margin-top:.5rem;touch-action:pan-y;cursor:grab}"
    ".trace-timeline input{font:inherit;color:inherit;background:var(--page);"
    "border:1px solid var(--grid);border-radius:6px;padding:.2rem .5rem}"
    ".trace-timeline output{color:var(--faint);overflow-wrap:anywhere}"
    ".trace-timeline .key{font-size:.8rem;color:var(--faint)}"
    ".trace-timeline .key b{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .9em}"
)


def trace_timeline(ranks: Sequence[tuple[str, Timeline]]) -> str:
    """HTML of all (title, timeline), with what it needs to run. Ranks whose clocks agree to within
    their length lie on one clock; others each begin at 0.
    """
    first = min(timeline.origin_us for _, timeline in ranks)
    longest = max(_length(timeline) for _, timeline in ranks)
    shifts = [round((timeline.origin_us - first) * UNIT) for _, timeline in ranks]
    if max(shifts) > longest:
        shifts = [0] * len(ranks)
    used = {kind for _, timeline in ranks for _, kind in timeline.names}
    data = {
        "kinds": KINDS,
        "ranks": [
            {
                "title": title,
                "shift": shift,
                "names": [[shortened(name, LONGEST_NAME), kind] for name, kind in timeline.names],
                "tracks": timeline.tracks,
                "marks": timeline.marks,
            }
            for (title, timeline), shift in zip(ranks, shifts, strict=True)
        ],
    }
    script = importlib.resources.files(__package__).joinpath("trace_timeline.js").read_text("utf-8")
    return (
        f'<div class="trace-timeline"><style>{STYLE}</style><div class="bar"><span><input type="search" '
        'placeholder="find a kernel or a kind" aria-label="Find in the timeline"> '
        "<button>whole</button></span><output></output></div>"
        '<canvas tabindex="0" aria-label="Timeline: arrows move, plus and minus zoom, 0 shows the whole"></canvas>'
        f'<div class="key">{_key(used)}</div><div class="tip" hidden></div><i hidden></i>'
        f'<script type="application/json">{_embedded(data)}</script></div><script>{script}</script>'
    )


def _length(timeline: Timeline) -> int:
    return max((_end(numbers) for _, numbers in timeline.tracks), default=0)


def _end(numbers: Sequence[int]) -> int:
    return sum(numbers[0::4]) + sum(numbers[1::4])


def _key(used: set[str]) -> str:
    shown = []
    for place, kind in enumerate(KINDS):
        hue = f"var(--series-{place + 1})" if place < 11 else f"hsl({place * 67 % 360} 55% 55%)"
        if kind in used:
            shown.append(f'<b style="background:{hue}"></b>{html.escape(kind)}')
    return "".join(shown) + (
        " · drag moves; double click, + and −, and after a click the wheel zoom; Enter goes to what is found next"
    )


def _embedded(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
