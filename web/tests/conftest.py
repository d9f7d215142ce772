# SPDX-License-Identifier: Apache-2.0
"""A browser with the built page (web/dist), and the command beside it."""
import http.server
import json
import os
import pathlib
import subprocess
import threading

import pytest
from browsers import open_browser
from selenium.webdriver.support.ui import WebDriverWait

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = ROOT / "web/dist"
COMMAND = os.environ.get("TESSERA_COMMAND", str(ROOT / "build/tessera"))


class Page:
    """The page in the browser. Rooms are opened by their state in the URL."""

    def __init__(self, browser, address):
        self.browser = browser
        self.driver = browser.driver
        self.address = address

    def open(self, state="", width=1400, height=1000, scheme="light"):
        self.driver.get("about:blank")
        self.browser.set_screen(width, height, scheme)
        self.driver.get(f"{self.address}/index.html#{state}")
        self.browser.opened()
        WebDriverWait(self.driver, 60).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def until(self, script, *args):
        return WebDriverWait(self.driver, 20).until(lambda d: d.execute_script(script, *args))

    def values(self):
        """Every number that the page shows, as the core gave it."""
        return {key: json.loads(value) for key, value in self.run(
            "return [...document.querySelectorAll('[data-key]')].map(n => [n.dataset.key, n.dataset.value])")}

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def errors(self):
        return self.browser.errors()


def choose(page, name, value):
    """By the control itself, as a mouse or a keyboard would."""
    page.run("""const input = document.getElementById('c-' + arguments[0]);
        if (input.type === 'checkbox') { if (input.checked !== (arguments[1] === '1')) input.click(); return; }
        input.value = arguments[1]; input.dispatchEvent(new Event('change', {bubbles: true}));""", name, str(value))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args):
        super().__init__(*args, directory=str(DIST))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture(scope="session")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def browser(downloads):
    running = open_browser(downloads)
    yield running
    running.driver.quit()


@pytest.fixture
def page(browser, server):
    browser.errors()
    found = Page(browser, server)
    yield found
    assert found.errors() == []


@pytest.fixture(scope="session")
def command():
    def run(*args):
        """The document of `tessera ARGS --json`."""
        done = subprocess.run([COMMAND, *map(str, args), "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    return run
