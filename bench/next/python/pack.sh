#!/usr/bin/env bash
# pack.sh WHEEL CHECKOUTS OUT: the archive for run.sh. WHEEL: of scripts/wheel.sh. CHECKOUTS: a folder with flash-attention/ and pytorch/ as
# python/tests/judges/run.py wants them. Needs pip's network for the small wheels.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
work=$(mktemp -d)
mkdir "$work/whl" "$work/co"
python3 -m pip download -q --no-deps -d "$work/whl" einops pytest pluggy iniconfig expecttest
# Without zip's compression, since xz does better on what is inside.
python3 - "$1" "$work/whl/$(basename "$1")" <<'P'
import sys
import zipfile
with zipfile.ZipFile(sys.argv[1]) as old, zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_STORED) as new:
    for entry in old.infolist():
        data = old.read(entry)
        entry.compress_type = zipfile.ZIP_STORED
        new.writestr(entry, data)
P
cp -r "$root/python/tests" "$root/python/bench" "$root/bench/next/python/host.py" "$work/"
cp -r "$2/flash-attention" "$2/pytorch" "$work/co/"
printf '[pytest]\naddopts = -q\n' >"$work/pytest.ini"
tar -C "$work" -c . | xz -T0 -6 --lzma2=preset=6,dict=96MiB >"$3"
rm -r "$work"
ls -la "$3"
