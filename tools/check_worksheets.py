#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Recalculates the worksheets that `tessera roofline --worksheet` prints, for random problems on every machine.

Each "... = value" is calculated from the numbers of its line. The last line but one must be the sum of the values of
the lines that it names.

Usage: check_worksheets.py TESSERA [--problems N] [--seed S]. Exit status 1 if a line does not add up.
"""
import argparse
import math
import random
import re
import subprocess
import sys

FUNCTIONS = {"max": max, "min": min, "log2": math.log2}
UNITS_IN_MS = {"GHz": 1e6, "GB/s": 1e6, "us": 1e-3, "ns": 1e-6}  # clk / GHz and B / (GB/s) are nanoseconds
TOKEN = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<word>[A-Za-z][A-Za-z0-9]*(?:/[A-Za-z]+)*)|(?P<sign>[-+*/(),^])")


def expression(text, in_ms):
    """Translates text to Python. It keeps numbers, signs, the words max, min and log2, and the units that scale."""
    parts = []
    for match in TOKEN.finditer(text):
        word = match["word"]
        if word in FUNCTIONS:
            parts.append(word)
        elif word is not None:
            if in_ms and word in UNITS_IN_MS and parts:
                parts[-1] = f"({parts[-1]}*{UNITS_IN_MS[word]})"
        else:
            parts.append("**" if match[0] == "^" else match[0])
    return "".join(parts)


def equations(formula):
    for part in formula.split("; "):
        part = part.rsplit(": ", 1)[-1]
        left, equals, right = part.partition(" = ")
        if equals:
            yield left, float(re.match(r"[-+\d.e]+", right)[0].rstrip(".")), " ms" in right


def redo(what, formula):
    """Returns the errors in one line, and its last value."""
    complaints, last = [], None
    for left, right, in_ms in equations(formula):
        last = right
        try:
            value = eval(expression(left, in_ms), {"__builtins__": {}, **FUNCTIONS})
        except (SyntaxError, TypeError, ZeroDivisionError) as error:
            complaints.append(f"{what}: {formula}\n    not understood: {error}")
            continue
        # Lines print four or five digits, and differences lose some of them.
        slack = 2e-3 * abs(right) + (1e-3 * abs(right) + (0 if in_ms else 10) if " - " in left else 0)
        if abs(value - right) > slack:
            complaints.append(f"{what}: {formula}\n    gives {value:.6g}, stands {right:.6g}")
    return complaints, last


def sheets(text):
    """Returns {title: [(what, formula)]} of a printed page; wrapped lines are joined."""
    result, lines = {}, None
    for line in text.splitlines():
        if line.startswith("Worksheet: "):
            lines = result.setdefault(line, [])
            continue
        if lines is None:
            continue
        if " what " in line and " calculation" in line:
            column = line.index("calculation")
            continue
        number = re.match(r"\s*(\d+)  ", line)
        if number:
            lines.append([line[number.end():column].strip(), line[column:].strip()])
        elif lines and line.strip():
            # A long word of the first column never wraps; the rest of the column is blank.
            lines[-1][1] += " " + line[column:].strip()
    return result


def check(title, lines):
    complaints, values = [], {}
    for what, formula in lines:
        if what == "time":
            total = float(re.search(r"= ([\d.e+-]+) ms$", formula)[1])
            terms = re.findall(r"([A-Za-z][A-Za-z0-9 ,/]*?) ([\d.]+(?:e[+-]?\d+)?)(?= \+| =)", formula)
            if abs(sum(float(value) for _, value in terms) - total) > 2e-3 * total:
                complaints.append(f"time: {formula}")
            for name, value in terms:
                if name not in values or abs(values[name] - float(value)) > 2e-3 * float(value):
                    complaints.append(f"time: no line gives {name} {value}")
            continue
        found, last = redo(what, formula)
        complaints += found
        if last is not None:
            values[what] = last
    return [f"{title}\n  {text}" for text in complaints]


def options_of(draw):
    """Returns a random problem that most kernels accept."""
    pick = draw.choice
    kv = pick([1, 2, 4, 8])
    options = ["--heads", f"{kv * pick([1, 1, 2, 4])}/{kv}", "--head-dim", str(pick([32, 64, 80, 96, 128, 192, 256]))]
    length = draw.randint(1, 9000)
    if pick([True, False, False]):
        options += ["--len-q", str(pick([1, 3, 100, 700])), "--len-kv", str(length)]
    else:
        options += ["--len", str(length)]
    options += ["--batch", str(pick([1, 1, 2, 5, 16]))]
    options += pick([[], ["--causal", "bottom-right"], ["--causal", "bottom-right"], ["--window", f"{draw.randint(0, 600)},0"]])
    options += pick([[], [], ["--dropout", pick(["0.1", "0.5", "0.3"])]])
    return options + ["--pass", pick(["forward", "backward"]), "--dtype", pick(["bf16", "fp16", "fp32"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tessera")
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    count, complaints = 0, []
    for _ in range(arguments.problems):
        options = options_of(draw)
        for device in ("h200", "h100-pcie", "a100", "l4", "rtx4090", "b200", "xeon-16"):
            cpu = device == "xeon-16"  # the published kernels are for GPUs, so a CPU takes only --by tessera
            for by in ("tessera",) if cpu else ("published", "tessera"):
                command = [arguments.tessera, "roofline", "--worksheet", "--device", device, "--by", by, *options]
                run = subprocess.run(command, capture_output=True, text=True, check=False)
                if run.returncode == 69:  # no kernel runs it on this machine
                    continue
                if run.returncode != 0:
                    complaints.append(f"{' '.join(command)}\n  {run.stderr}")
                for title, lines in sheets(run.stdout).items():
                    count += 1
                    complaints += [f"{' '.join(command[1:])}\n  {c}" for c in check(title, lines)]
    print("\n".join(complaints + [f"{count} worksheets, {len(complaints)} complaints"]))
    return 1 if complaints or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
