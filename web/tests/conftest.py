# SPDX-License-Identifier: Apache-2.0
"""A browser with the built page (web/dist), and the command beside it."""
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import threading

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = ROOT / "web/dist"
COMMAND = os.environ.get("TESSERA_COMMAND", str(ROOT / "build/tessera"))


class Page:
    """The page in the browser. Rooms are opened by their state in the URL."""

    def __init__(self, driver, address):
        self.driver = driver
        self.address = address

    def open(self, state="", width=1400, height=1000, scheme="light"):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                    {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]})
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/index.html#{state}")
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
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


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
def driver(downloads):
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    browser = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
    browser.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    yield browser
    browser.quit()


@pytest.fixture
def page(driver, server):
    driver.get_log("browser")
    found = Page(driver, server)
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
