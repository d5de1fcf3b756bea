"""The pages as a browser shows them: none is wider than the screen, formulas are drawn, nothing comes from elsewhere.

Skipped unless `make docs` has built the site and chromium is installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parent.parent / "docs" / "_build" / "html"
LISTS = {"genindex", "py-modindex", "search"}
PAGES = [page for page in sorted(SITE.rglob("*.html")) if "_modules" not in page.parts and page.stem not in LISTS]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="the pages are looked at in chromium, which is not installed"),
    pytest.mark.skipif(not PAGES, reason="the site is not built; make docs does"),
]
LOOK = """() => ({
    wide: document.documentElement.scrollWidth > innerWidth,
    raw: [...document.querySelectorAll(".math")].filter(e => !e.querySelector(".katex")).length,
    errors: document.querySelectorAll(".katex-error").length,
    missing: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_pages_fit_the_screen_draw_their_formulas_and_load_nothing_else(browser: Any) -> None:
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    formulas, problems = 0, {}
    for file in PAGES:
        page.goto(file.as_uri())
        formulas += page.locator(".katex-html").count()
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            found = page.evaluate(LOOK)
            if any(found.values()):
                problems[file.name, width] = found
    assert problems == {}
    assert formulas > 100
    assert [url for url in requests if not url.startswith((SITE.as_uri(), "data:"))] == []
