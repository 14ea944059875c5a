"""The built site in Chromium: no error, nothing too wide, both themes, a search that works.

Needs the package `playwright` and a Chromium of the system, as `apt-get install chromium` has it.
"""

import functools
import http.server
import shutil
import threading

import pytest
import site_build

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("mkdocs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = {"light": "default", "dark": "slate"}
# What is wider than the window, other than what scrolls by itself.
TOO_WIDE = """() => [...document.querySelectorAll("article *")].filter(element => {
    const scrolls = element.closest("pre, .md-typeset__scrollwrap, .highlight, .tabbed-labels")
    return !scrolls && element.getBoundingClientRect().right > innerWidth + 1
}).map(element => element.outerHTML.slice(0, 200))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = site_build.site(tmp_path_factory.mktemp("site"))
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        names = sorted(path.relative_to(directory) for path in directory.rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}", [str(name) for name in names]
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Root may not use the sandbox; the pages are ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, served):
    """Opens a page; what its console says is in its list `said`."""
    contexts = []

    def opened(name, *, width, scheme):
        view = {"width": width, "height": 900}
        context = browser.new_context(viewport=view, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.said = []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(f"{served[0]}/{name}", wait_until="load")
        return page

    yield opened
    for context in contexts:
        context.close()


def test_what_is_wrong_is_found(opened):
    page = opened("index.html", width=390, scheme="light")
    assert (page.evaluate(TOO_WIDE), page.said) == ([], [])
    page.evaluate(
        """() => {
            document.querySelector("article").innerHTML += '<p style="width: 500px">wide</p>'
            console.error("wrong")
        }"""
    )
    assert len(page.evaluate(TOO_WIDE)) == 1
    assert page.said == ["wrong"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_has_an_error_or_is_too_wide(width, scheme, opened, served):
    wrong = {}
    page = opened("index.html", width=WIDTHS[width], scheme=scheme)
    for name in served[1]:
        page.goto(f"{served[0]}/{name}", wait_until="load")
        found = [*page.said, *page.evaluate(TOO_WIDE)]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append("the page scrolls sideways")
        if page.evaluate("document.body.dataset.mdColorScheme") != SCHEMES[scheme]:
            found.append("another theme")
        if page.evaluate("[...document.images].some(image => !image.naturalWidth)"):
            found.append("an image is missing")
        page.said.clear()
        if found:
            wrong[name] = found[:3]
    assert not wrong


def test_the_switch_changes_the_theme_and_the_drawings(opened):
    page = opened("index.html", width=1280, scheme="light")
    pictures = page.locator('article img[src$="home.svg"]')
    light = pictures.screenshot()
    page.locator('label[title="Dark"]:visible').click()
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert (
        page.evaluate("getComputedStyle(document.querySelector('article img')).colorScheme")
        == "dark"
    )
    assert pictures.screenshot() != light
    page.reload()
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert page.said == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_leads_to_a_page(width, opened):
    page = opened("index.html", width=WIDTHS[width], scheme="light")
    if width == "phone":
        page.locator('label[for="__search"]:visible').first.click()
    # By keys, as a reader: what is set at once may be overlooked while the field opens.
    page.locator("input.md-search__input").press_sequentially("image folder")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    first.click()
    page.wait_for_url("**/image_folders.html*")
    assert page.locator("article h1").inner_text().startswith("Images in folders")
    assert page.said == []
