#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of docs/cli.md that draw the README's charts, and compares the results with docs/images.

    tools/readme_charts.py build/tessera            # one line per chart that differs; exit status 1 if there are any
    tools/readme_charts.py build/tessera --update   # redraws them
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "    H=bench/results"


def commands():
    """Returns the indented lines after BEGIN, as one shell script."""
    text = (ROOT / "docs/cli.md").read_text()
    if BEGIN not in text:
        sys.exit(f"docs/cli.md: expected a block that begins with {BEGIN.strip()!r}")
    lines = text[text.index(BEGIN):].splitlines()
    block = []
    for line in lines:
        if not line.startswith("    "):
            break
        block.append(line[4:])
    return "\n".join(block)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera", type=pathlib.Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    script = commands()
    names = re.findall(r"--svg (docs/images/\S+)", script)
    with tempfile.TemporaryDirectory() as folder:
        script = script.replace("tessera report", f"'{options.tessera.resolve()}' report")
        script = script.replace("--svg docs/images/", f"--svg {folder}/")
        subprocess.run(["bash", "-ec", script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        other = 0
        for name in names:
            drawn = pathlib.Path(folder, pathlib.Path(name).name).read_text()
            page = ROOT / name
            if page.exists() and page.read_text() == drawn:
                continue
            other += 1
            if options.update:
                page.write_text(drawn)
            else:
                print(f"{name} is not what docs/cli.md draws; tools/readme_charts.py {options.tessera} --update")
    return 1 if other and not options.update else 0


if __name__ == "__main__":
    sys.exit(main())
