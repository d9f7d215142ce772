#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a build with the preset `coverage`, and prints the share of lines of src/ and toolkit/ that ran, by folder.

    tools/coverage.py FOLDER [--files] [--part TEXT]

--files prints it by file. --part runs only test programs whose name contains TEXT.
"""
import argparse
import collections
import json
import os
import pathlib
import subprocess

SOURCE = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--part", default="")
    options = parser.parse_args()
    build = options.folder.resolve()
    for old in build.glob("*.profraw"):
        old.unlink()
    # %4m: at most four files per program; processes merge into them.
    environment = dict(os.environ, LLVM_PROFILE_FILE=str(build / "%4m.profraw"))
    # Tests that compile something are left out, because their products are not instrumented.
    subprocess.run(["ctest", "--test-dir", build, "-R", options.part or ".", "-E", "consumer|new_schedule|check_",
                    "-j", str(os.cpu_count() or 1), "-Q"],
                   env=environment, check=False)
    raw = [str(path) for path in build.glob("*.profraw")]
    merged = str(build / "tests.profdata")
    subprocess.run(["llvm-profdata", "merge", "-sparse", "-o", merged, *raw], check=True)
    programs = [str(path) for path in sorted(build.glob("tests/*_test")) if path.is_file()]
    if (build / "tessera").exists():
        programs.append(str(build / "tessera"))
    objects = [argument for program in programs[1:] for argument in ("-object", program)]
    done = subprocess.run(["llvm-cov", "export", "-summary-only", f"-instr-profile={merged}", programs[0], *objects],
                          check=True, capture_output=True, text=True)
    lines, covered = collections.Counter(), collections.Counter()
    for entry in json.loads(done.stdout)["data"][0]["files"]:
        path = pathlib.Path(entry["filename"])
        if not any(path.is_relative_to(SOURCE / folder) for folder in ("src", "toolkit")):
            continue
        name = str(path.relative_to(SOURCE) if options.files else path.parent.relative_to(SOURCE))
        for key in (name, "all"):
            lines[key] += entry["summary"]["lines"]["count"]
            covered[key] += entry["summary"]["lines"]["covered"]
    print(f"{'':48} {'lines':>7} {'run':>7}")
    for name in sorted(lines):
        print(f"{name:48} {lines[name]:7} {100 * covered[name] / max(lines[name], 1):6.1f}%")


if __name__ == "__main__":
    main()
