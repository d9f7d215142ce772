# SPDX-License-Identifier: Apache-2.0
"""Several suites of run.py at once, in many processes, for a limited time; then one table of their counts.

    python python/tests/judges/together.py OUT --seconds 170 \\
        "flash-attention=6:FOLDER/flash-attention --device cuda --count 3800" "pytorch=2:FOLDER/pytorch -k TestSDPA"
    python python/tests/judges/together.py OUT        # the table of what lies there

A suite is NAME=PROCESSES:CHECKOUT and further options of run.py; the suites begin in this order.
Each process writes OUT/NAME_PART.json and .txt. A process that ends without a report is named, not left out."""
import argparse
import collections
import json
import os
import pathlib
import shlex
import subprocess
import sys

RUN = pathlib.Path(__file__).with_name("run.py")
TO_END = 25  # seconds before the end from which on no case begins


def begin(out, seconds, text):
    """The processes of one suite: [(name of the report, Popen)]."""
    name, _, rest = text.partition("=")
    processes, _, rest = rest.partition(":")
    checkout, *options = shlex.split(rest)
    for part in range(int(processes)):
        report = out / f"{name}_{os.getpid()}_{part}"
        command = [sys.executable, str(RUN), name, checkout, *options, "--part", f"{part}/{processes}",
                   "--minutes", str((seconds - TO_END) / 60), "--report", f"{report}.json"]
        with open(f"{report}.txt", "w") as log:
            yield report, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                           env={**os.environ, "OMP_NUM_THREADS": "1"})


def table(out):
    """Prints the sums of all reports in `out` and the reason of each failure. Returns how many failed."""
    counts, reasons = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
    for file in sorted(out.glob("*.json")):
        report = json.loads(file.read_text())
        counts[report["suite"]].update(report["counts"])
        counts[report["suite"]]["processes"] += 1
        for why, number in report["reasons"]:
            reasons[report["suite"]][why] += number
    for suite, count in counts.items():
        print(f"{suite}: " + ", ".join(f"{number} {what}" for what, number in sorted(count.items())))
        for why, number in reasons[suite].most_common():
            print(f"  {number:5} x {why}")
    return sum(count["failed"] for count in counts.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--seconds", type=float, default=170)
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    running = [one for text in options.suites for one in begin(options.out, options.seconds, text)]
    for report, process in running:
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        if not report.with_name(report.name + ".json").exists():
            print(f"{report.name}: no report (status {process.wait()})")
    sys.exit(1 if table(options.out) else 0)


if __name__ == "__main__":
    main()
