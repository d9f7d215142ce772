#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The page that explains attention by tiles: builds web/dist/index.html, one file that opens from a disk too, and serves it.
#
#   scripts/web.sh [--build] [--port N]
#
# --build: builds only. --port: default 8000, on this machine only.
# Needs emscripten: 109 MB of packages, 0.85 GB unpacked.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

BUILD_ONLY= PORT=8000
while [[ $# -gt 0 ]]; do
    case $1 in
        --build) BUILD_ONLY=yes ;;
        --port) PORT=${2:?--port: expected a number}; shift ;;
        *) die "unknown option $1; usage: scripts/web.sh [--build] [--port N]" ;;
    esac
    shift
done

need "${WEB_PACKAGES[@]}"
command -v emcmake >/dev/null || die "emcmake not found: expected emscripten"
# A node that is not the distribution's own looks for acorn, which the last step of emscripten takes, elsewhere.
export NODE_PATH=${NODE_PATH:-/usr/share/nodejs}
FOLDER=build-web
say "page: the core as WebAssembly"
mkdir -p "$FOLDER"
emcmake cmake -S web -B "$FOLDER" -G Ninja >"$FOLDER/configure.log" 2>&1 || { cat "$FOLDER/configure.log" >&2; exit 1; }
cmake --build "$FOLDER" -j "$JOBS" | short
# The distribution's own Python has the package markdown; another python3 on the PATH may not.
PYTHON=python3
[[ -x /usr/bin/python3 ]] && PYTHON=/usr/bin/python3
"$PYTHON" web/bundle.py "$FOLDER" web/dist
[[ -n $BUILD_ONLY ]] && exit
say "http://localhost:$PORT/ (ends with Ctrl-C); web/dist/index.html opens from the disk as well"
exec python3 -m http.server --bind 127.0.0.1 --directory web/dist "$PORT"
