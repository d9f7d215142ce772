#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by run.sh and test.sh: packages, building, and short progress.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck disable=SC2034  # used by the scripts that source this one
BUILD_PACKAGES=(g++ cmake ninja-build pkg-config libhwy-dev libtbb-dev libfmt-dev nlohmann-json3-dev libcli11-dev
                librsvg2-dev libcairo2-dev zlib1g-dev libsqlite3-dev)
# shellcheck disable=SC2034
WEB_PACKAGES=(emscripten cmake ninja-build libhwy-dev libfmt-dev nlohmann-json3-dev libcli11-dev python3
              python3-markdown)
JOBS=${JOBS:-$(nproc)}

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

missing_packages() {
    local package
    for package in "$@"; do
        [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || echo "$package"
    done
}

# Runs a command as root.
as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "needs root for: $* (no sudo here; run it as root, then start again)"
    fi
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -o Dpkg::Use-Pty=0 "$@" >/dev/null
}

# need PACKAGE...: installs what is missing of them; asks the network for nothing when all is there.
need() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        local tool
        for tool in g++ cmake ninja; do
            command -v "$tool" >/dev/null || die "$tool not found, and no apt-get to install it. tessera needs what Debian \
calls: $* (on another system: a C++20 compiler, CMake >= 3.25, Ninja, Highway, oneTBB, fmt, nlohmann-json, CLI11, zlib, SQLite)"
        done
        return
    fi
    local missing
    mapfile -t missing < <(missing_packages "$@")
    [[ ${#missing[@]} == 0 ]] && return
    say "installing ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq || die "apt-get update failed; is there a network?"
    apt_install "${missing[@]}" || die "could not install: ${missing[*]}"
}

# Compiling again what did not change costs nothing with ccache. Paths are hashed as seen from the build folder, so that
# build folders beside each other share objects.
use_ccache() {
    command -v ccache >/dev/null || return 0
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
    export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}
    export CCACHE_NOHASHDIR=1  # or objects with line numbers are kept for one checkout alone
    export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}  # or it keeps nothing that uses such headers
}
use_ccache

# Of ninja's and ctest's lines "[n/all] ..." and "n/all Test ..." (passed, skipped), shows one in ten; of a GoogleTest
# program that failed, the tests that did not end well. Everything else is shown. On a terminal ninja keeps to one line by
# itself.
short() {
    awk '
        /^\[[0-9]+\/[0-9]+\]/ { split(substr($1, 2), at, /[\/\]]/); label = substr($0, 1, 110) }
        /^ *[0-9]+\/[0-9]+ Test.*( Passed |[*]Skipped )/ { split($1, at, "/"); label = at[1] " of " at[2] " tests" }
        /^\[[0-9]+\/[0-9]+\]|^ *[0-9]+\/[0-9]+ Test.*( Passed |[*]Skipped )/ {
            tenth = int(10 * at[1] / at[2])
            if (tenth != last || at[1] == at[2]) { print label; fflush() }
            last = tenth
            next
        }
        /^\[ RUN  / { running = $0; next }
        /^\[       OK |^\[-----|^\[=====/ { running = ""; next }
        running != "" { print running; running = "" }
        /^ *Start +[0-9]+:|^Test project|^Internal ctest|^$|^ninja: / { next }
        { print; fflush() }'
}

# On few cores what counts is the work, not how many files there are to share it.
if [[ $JOBS -le 4 ]]; then TOGETHER=-DTESSERA_TOGETHER=ON; else TOGETHER=-DTESSERA_TOGETHER=OFF; fi

# configure_and_build FOLDER [-DOPTION...] [-- TARGET...]
configure_and_build() {
    local folder=$1 options=() targets=()
    shift
    while [[ $# -gt 0 && $1 != -- ]]; do options+=("$1"); shift; done
    [[ $# -gt 0 ]] && { shift; targets=(--target "$@"); }
    mkdir -p "$folder"
    cmake "${options[@]}" "$TOGETHER" >"$folder/configure.log" 2>&1 || { cat "$folder/configure.log" >&2; return 1; }
    if [[ -t 1 ]]; then
        cmake --build "$folder" -j "$JOBS" "${targets[@]}"
    else
        cmake --build "$folder" -j "$JOBS" "${targets[@]}" | short
    fi
}
