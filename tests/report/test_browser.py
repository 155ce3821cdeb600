"""The report in a real Chromium: offline, in light and dark, copyable, without an error."""

import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from stepgauge.report import figure
from stepgauge.report.findings import Finding
from stepgauge.report.page import Flame, Page, Plot, Section, Text
from stepgauge.report.table import Table

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
TIMEOUT_MS = 300_000  # a busy machine may need longer than Playwright's 30 s
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    bars = figure.stacked_bars(
        ["small", "large", "huge"],
        {"forward": [1.0, 2.0, None], "backward": [2.0, 4.0, None]},
        totals=[3.0, 6.0, None],
        unit="ms",
        points={"S1": [2.5, None, None]},
    )
    grouped = figure.grouped_bars(["a", "b"], {"x": [1.0, None], "y": [2.0, 3.0]}, unit="ms")
    curve = figure.lines({"loss": ([1, 2, 3], [5.0, 2.0, 1.0])}, x="step", y="nats", dots=("loss",))
    table = Table(
        ["name", "ms"],
        [["a <b>", "1.5"], ["50%", "2"]],
        numeric=frozenset(["ms"]),
        caption="Figures",
    )
    plots = [Plot(svg, "What it shows.") for svg in (bars, grouped, curve)]
    sections = [
        Section("First & last", "Is it <so>?", [Text("1 < 2"), *plots, table], "Yes.", "By hand."),
        Section("Elsewhere", "Never run?", reason="needs 2 GPUs, this machine has 0"),
    ]
    finding = Finding(
        5.0, "compile=on", "15 ms per step with compile=off.", "stepgauge bench step", True
    )
    shown = Page(
        title="A study",
        sections=sections,
        facts={"Device": "Test"},
        findings=[finding],
    )
    return shown.write(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            timeout=TIMEOUT_MS,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
            ],
        )
        yield browser
        browser.close()


def page_of(folder, block):
    """Writes a page with one block and returns its path."""
    page = Page(title="A page", sections=[Section("Row", "Where?", [block])], facts={})
    return page.write(folder / "report.html")


def opened(browser, path, scheme="light"):
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 800})
    tab.set_default_timeout(TIMEOUT_MS)
    tab.problems = []
    tab.on("console", lambda message: tab.problems.append(message.text))
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on(
        "request",
        lambda request: request.url.startswith("file:") or tab.problems.append(request.url),
    )
    tab.goto(path.as_uri())
    return tab


def test_the_page_loads_nothing_and_shows_everything(browser, path):
    tab = opened(browser, path)
    assert tab.problems == []
    assert tab.title() == "A study"
    assert tab.locator("svg").count() == 3
    text = tab.locator("body").inner_text()
    for words in (
        "Is it <so>?",
        "1 < 2",
        "a <b>",
        "Elsewhere: needs 2 GPUs, this machine has 0",
        "did not run",
        "compile=on saves 5.000 ms per step",
        "Yes.",
    ):
        assert words in text
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def colours(tab):
    return tab.evaluate(
        """() => {
            const bar = [...document.querySelectorAll('svg path')].find(p => p.style.fill.includes('--series-1'));
            const text = document.querySelector('svg text');
            return [document.body, bar, text].map((e, i) => getComputedStyle(e)[i ? 'fill' : 'backgroundColor']);
        }"""
    )


def test_light_and_dark_differ_in_page_bars_and_text(browser, path):
    light, dark = (colours(opened(browser, path, scheme)) for scheme in ("light", "dark"))
    assert all(a != b for a, b in zip(light, dark, strict=True)), (light, dark)


def test_the_button_switches_the_theme(browser, path):
    tab = opened(browser, path, "light")
    before = colours(tab)
    tab.click("#theme")
    assert colours(tab) == colours(opened(browser, path, "dark")) != before


def test_tables_and_commands_can_be_copied(browser, path):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(path.as_uri())
    tab.evaluate(
        "() => { navigator.clipboard.writeText = async text => { window.copied = text; }; }"
    )
    wanted = {"csv": "a <b>,1.5", "markdown": "| a <b> | 1.5 |", "latex": r"50\%",
              "copy": "stepgauge bench step"}  # fmt: skip
    for name, text in wanted.items():
        tab.click(f"button:text-is('{name}')")
        tab.wait_for_function("text => (window.copied ?? '').includes(text)", arg=text)


def test_plots_are_described_and_can_be_saved(browser, path):
    tab = opened(browser, path)
    description = tab.locator("svg").first.get_attribute("aria-label")
    assert description.startswith("ms. small: forward 1, backward 2, total 3; large: forward 2")
    with tab.expect_download() as download:
        tab.locator("button.save").first.click()
    saved = download.value.path().read_text()
    root = ElementTree.fromstring(saved)
    assert root.tag.endswith("svg") and "var(--" not in saved and "rgb(" in saved
    background = root[0]
    assert background.get("width") == "100%" and "rgb(255, 255, 255)" in background.get("style")
    assert tab.locator("figure svg > rect").count() == 0, "the page's own plot stays as it is"
    assert download.value.suggested_filename == "What-it-shows-.svg"


def test_links_lead_to_sections_and_stay_visible(browser, path):
    tab = opened(browser, path)
    for link in tab.locator("nav a").all():
        assert tab.locator(link.get_attribute("href")).count() == 1
    tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    assert tab.locator("nav a").first.is_visible()
    assert tab.evaluate("document.querySelector('nav').getBoundingClientRect().top >= 0")
    tab.set_viewport_size({"width": 390, "height": 800})  # a phone
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_long_names_wrap_so_that_figures_stay_visible(browser, tmp_path):
    columns = ["kernel", "kind", *(f"figure {number}" for number in range(9))]
    rows = [["void_kernel_without_a_space_in_its_name_" * 3, "elementwise", *["1,234"] * 9]]
    table = Table(columns, rows, numeric=frozenset(columns[2:]))
    tab = opened(browser, page_of(tmp_path, table))
    assert tab.evaluate(
        "(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))"
    )
    assert tab.evaluate("document.querySelector('td.n').getClientRects().length") == 1


@pytest.fixture(scope="module")
def flame_path(tmp_path_factory):
    def block(number):
        return [
            f"blocks.{number}",
            0.0,
            [["attention", 1000.0, [["softmax </script>", 500.0, []]]], ["norm", 500.0, []]],
        ]

    tree = [
        "",
        0.0,
        [["forward", 0.0, [block(0), block(1), ["head", 2000.0, []]]], ["optimizer", 2000.0, []]],
    ]
    return page_of(tmp_path_factory.mktemp("flame"), Flame(tree, 2, "By nesting."))


def boxes(tab):
    return [t for t in tab.locator(".flame .rows div").all_inner_texts() if t]


def test_a_flame_graph_zooms_searches_and_merges(browser, flame_path):
    tab = opened(browser, flame_path)
    assert tab.problems == []
    names = boxes(tab)
    assert names[:3] == ["all", "forward", "blocks.0"]
    assert names.count("norm") == 2
    assert "softmax </script>" in names
    output = tab.locator(".flame output")
    assert output.inner_text() == "all: 4.00 ms per step, 100 %"
    tab.fill(".flame input[type=search]", "NORM")
    assert output.inner_text().startswith("found: 0.500 ms per step, 12.5 %")
    assert tab.locator(".flame .found").count() == 2
    tab.check(".flame .merge")
    assert boxes(tab).count("norm") == 1
    assert "blocks.*" in boxes(tab)
    tab.fill(".flame input[type=search]", "")
    tab.locator(".flame .rows div", has_text="blocks.*").first.click()
    assert "head" not in boxes(tab)
    assert output.inner_text().startswith("blocks.*: 2.00 ms per step, 50.0 %")
    tab.click(".flame .reset")
    assert "head" in boxes(tab)
    tab.uncheck(".flame .merge")
    tab.focus(".flame .rows [tabindex='0']")
    for key, name in (("ArrowDown", "forward"), ("ArrowRight", "optimizer"), ("ArrowLeft", "forward"),
                      ("ArrowDown", "blocks.0"), ("ArrowUp", "forward")):  # fmt: skip
        tab.keyboard.press(key)
        assert output.inner_text().startswith(f"{name}: "), key
    tab.keyboard.press("Enter")
    assert "optimizer" not in boxes(tab)
    tab.keyboard.press("Escape")
    assert "optimizer" in boxes(tab)


def test_the_width_of_a_box_is_its_time(browser, tmp_path):
    """This includes boxes of a few pixels: wider ones would cover their neighbours."""
    blocks = [
        [f"blocks.{number}", 0.0, [["norm", 5000.0, []], ["mm", 20000.0, []]]]
        for number in range(200)
    ]
    flame = Flame(["", 0.0, [["forward", 0.0, blocks]]], 1, "By nesting.")
    tab = opened(browser, page_of(tmp_path, flame))
    whole, _, *parts = tab.evaluate(
        "[...document.querySelectorAll('.flame .rows div')].map(box => box.getBoundingClientRect().width)"
    )
    assert sum(parts) == pytest.approx(2 * whole, rel=0.01)  # the blocks and their children
    assert tab.locator(".flame output").inner_text() == "all: 5,000 ms per step, 100 %"


def test_the_profile_fits_and_changes_with_the_theme(browser, flame_path):
    def colour(tab):
        return tab.evaluate(
            "getComputedStyle(document.querySelector('.flame .rows div')).backgroundColor"
        )

    light, dark = (opened(browser, flame_path, scheme) for scheme in ("light", "dark"))
    assert colour(light) != colour(dark)
    assert light.evaluate("document.documentElement.scrollWidth <= innerWidth")
