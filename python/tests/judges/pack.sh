#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One archive with what a machine without network needs to run the package's tests and those of other projects:
#
#   python/tests/judges/pack.sh WHEEL CHECKOUTS OUT.tar.xz
#
# WHEEL: of scripts/wheel.sh. CHECKOUTS: a folder with flash-attention/, pytorch/ and transformers/ as run.py wants them,
# cut to what its suites read. There:
#
#   tar xJf OUT.tar.xz && python3 -m pip install --no-index --no-deps --target site whl/*.whl
#   PYTHONPATH=$PWD/site python3 -m pytest -c pytest.ini --rootdir . tests --ignore tests/judges
#   PYTHONPATH=$PWD/site python3 tests/judges/together.py OUT "flash-attention=8:co/flash-attention --device cuda"
set -euo pipefail
[[ $# -eq 3 ]] || { printf 'usage: pack.sh WHEEL CHECKOUTS OUT.tar.xz\n' >&2; exit 2; }
python=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
mkdir "$work/whl"
python3 -m pip download -q --no-deps -d "$work/whl" -r "$python/tests/judges/requirements.txt" iniconfig pluggy pytest
# Without zip's compression: xz does better on what is inside.
python3 - "$1" "$work/whl/$(basename "$1")" <<'P'
import sys
import zipfile
with zipfile.ZipFile(sys.argv[1]) as old, zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_STORED) as new:
    for entry in old.infolist():
        data = old.read(entry)
        entry.compress_type = zipfile.ZIP_STORED
        new.writestr(entry, data)
P
cp -r "$python/tests" "$python/bench" "$work/"
cp -r "$2" "$work/co"
find "$work" -name __pycache__ -prune -exec rm -r {} +
printf '[pytest]\naddopts = -q\n' >"$work/pytest.ini"
tar -C "$work" -c . | xz -T0 -6 --lzma2=preset=6,dict=96MiB >"$3"
ls -l "$3"
