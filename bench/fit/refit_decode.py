#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Refits the model of cuda.decode.forward after the kernel has changed.

    python3 bench/compare/cuda_decode.py build/src/libtessera.so --fa3 --set all --commit HASH --out decode.jsonl  # on an H200
    python3 bench/fit/refit_decode.py build decode.jsonl --write

The Records of tessera take the place of bench/results/h200/now/decode_*.jsonl: those of `--set short` are fitted
(decode_fitted.jsonl), and the rest, other shapes and caches, are held out (decode_held_out.jsonl). Then the constants in
src/model/families_gpu.cc are fitted, tessera is rebuilt, and its errors are printed. Without --write nothing is changed.
docs/model.md (the table of section 3, the figures of section 6) is edited by hand."""
import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import refit

NOW = refit.ROOT / "bench/results/h200/now"
FAMILY = "tessera fa2 forward few"


def split(path):
    """{name of a file: lines of the Records for it}."""
    lines = {"decode_fitted.jsonl": [], "decode_held_out.jsonl": []}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kernel"] != "cuda.decode.forward":
            continue
        if "set" not in record:
            raise SystemExit(f"{path}: expected Records of the present cuda_decode.py, got one without \"set\"")
        lines["decode_fitted.jsonl" if record["set"] == "short" else "decode_held_out.jsonl"].append(line + "\n")
    for name, of_file in lines.items():
        if len(of_file) < 8:
            raise SystemExit(f"{path}: expected 8 Records or more for {name}, got {len(of_file)}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="build folder, configured")
    parser.add_argument("records", help="the output of cuda_decode.py --set all --out")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, lines in split(options.records).items():
            paths.append(pathlib.Path(folder) / name)
            paths[-1].write_text("".join(lines), encoding="utf-8")
        refit.build(options.build, "fit_model", "tessera")
        constants, _ = refit.fits(options.build, FAMILY, "", list(map(str, paths)))
        if options.write:
            for path in paths:
                shutil.copy(path, NOW / path.name)
            refit.move(FAMILY, constants)
            refit.build(options.build, "tessera", "fit_model")
        subprocess.run([f"{options.build}/tessera", "roofline", "--accuracy", "--records", *map(str, paths)], check=True)


if __name__ == "__main__":
    main()
