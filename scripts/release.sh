#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds everything that a release has on PyPI, and checks it: the wheels for x86-64 and for 64-bit Arm, which run on
# every Linux with glibc 2.28 or later, and the source distribution. docs/releasing.md says what a person does then.
#
#   scripts/release.sh [--without-torch] [--without-jax] [--without-cuda] [--venv FOLDER] [-o FOLDER]
#
# The options are those of scripts/wheel.sh. Needs Debian 12 on x86-64.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

VENV=build-python/venv OUTPUT=dist OPTIONS=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --without-torch | --without-jax | --without-cuda) OPTIONS+=("$1") ;;
        --venv | -o)
            [[ $# -ge 2 ]] || die "$1: expected a folder, got nothing"
            if [[ $1 == -o ]]; then OUTPUT=$2; else VENV=$2; fi
            shift ;;
        *) die "unknown option $1; usage: scripts/release.sh [--without-torch] [--without-jax] [--without-cuda] \
[--venv FOLDER] [-o FOLDER]" ;;
    esac
    shift
done
mkdir -p "$OUTPUT"
rm -f "$OUTPUT"/tessera_attention-*  # an upload takes all that lies here

for processor in x86_64 aarch64; do
    scripts/wheel.sh --manylinux "$processor" "${OPTIONS[@]}" --venv "$VENV" -o "$OUTPUT"
done
say "source distribution"
build='import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])'
"$VENV/bin/python" -c "$build" "$OUTPUT" >build-manylinux-x86_64/sdist.log 2>&1 ||
    { cat build-manylinux-x86_64/sdist.log >&2; die "the source distribution failed"; }

say "checks"
"$VENV/bin/python" -c 'import twine' 2>/dev/null || "$VENV/bin/python" -m pip install -q twine ||
    die "could not install twine"
"$VENV/bin/python" -m twine check --strict "$OUTPUT"/tessera_attention-*
du -h "$OUTPUT"/tessera_attention-*
