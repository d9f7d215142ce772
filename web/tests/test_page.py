# SPDX-License-Identifier: Apache-2.0
"""The page as a whole: one file, no request to anybody, narrow screens, accessibility."""
import pathlib
import re

import pytest
from conftest import DIST, Page

STATES = ("compare", "learn", "learn?lesson=7", "learn?lesson=0", "learn?lesson=16", "learn?lesson=faq", "learn?lesson=exam", "learn?lesson=17", "learn?lesson=21", "learn?lesson=recap", "learn?lesson=kernel", "compare?step=100", "tiles", "walk?step=5", "paper?step=2", "paper?ask=1", "roofline", "race?step=120", "backward?step=3", "which", "walk?ask=1&step=1&from=own",
          "walk?row=4000")


def axe():
    """axe-core's script, from a package of PyPI that carries it."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is not here: pip install --no-deps axe-playwright-python")
    return (pathlib.Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def test_is_one_small_file_that_names_no_other_host():
    content = (DIST / "index.html").read_text(encoding="utf-8")
    assert len(content.encode()) < 3_000_000
    assert "default-src 'none'" in content  # the browser itself refuses every request
    assert re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=['\"](?!data:)", content) == []


def test_asks_the_network_for_nothing(page):
    page.open()
    for state in STATES:
        page.run("location.hash = arguments[0]", state)
        page.until("return document.querySelector('#room-picture').children.length > 0")
    assert page.run("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_opens_from_the_disk(browser):
    disk = Page(browser, f"file://{DIST}")
    disk.open("walk?step=3")
    assert disk.values()["l"] > 0
    assert disk.errors() == []


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(page, state, width):
    page.open(state, width=width, height=844)
    assert page.run("return document.documentElement.scrollWidth") <= width


def test_no_lesson_is_wider_than_a_phone(page):
    page.open("learn", width=390, height=844)
    for link in page.run("return [...document.querySelectorAll('#room-picture a')].map(a => a.hash.slice(1))"):
        page.open(link, width=390, height=844)
        page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.run("return document.documentElement.scrollWidth") <= 390, link


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES)
def test_is_accessible(page, state, scheme):
    script = axe()
    page.open(state, width=390 if scheme == "dark" else 1400, scheme=scheme)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.browser.inject(script)
    found = page.driver.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run(document, {}).then(done, (e) => done({violations: [{id: String(e), nodes: []}]}))")
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found["violations"]] == []


def test_pictures_fill_the_room_they_have(page):
    page.open("walk", width=390)
    box = page.run("return document.querySelector('#picture-walk svg').viewBox.baseVal.width")
    assert box < 390
    page.open("walk", width=1400)
    assert page.run("return document.querySelector('#picture-walk svg').viewBox.baseVal.width") > 800
