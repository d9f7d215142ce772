#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Refits the model after a kernel has become faster: retires its old Records, fits the new ones and updates the constants.

    # the new Records lie in bench/results/h200/now (backward.jsonl, drawn_SEED.jsonl, blind_SEED.jsonl)
    python3 bench/fit/refit.py build --kernel "fa2 backward" --new 1a2b3c4 --write

Steps for each --kernel of tessera's on an H200:
 1. Its Records of commits other than --new and those in --keep belong to an older kernel: their commits are added to kRetired
    in toolkit/measure/accuracy.cc.
 2. fit_model fits the family (or two, if head_dims over 128 have their own) to the remaining Records.
 3. The constants are written to src/model/families_gpu.cc with three digits, if the fitted rows' median error falls.
 4. tessera is rebuilt, and `tessera roofline --accuracy` prints its errors.
--up-to 64 restricts the change to the kernel of head_dims up to 64: Records of others stay, and the family gets separate
constants for them. With few new rows, --free exp_exposed,end_cycles fits these constants alone.
Without --write nothing is changed; the changes are printed. docs/model.md (the table of section 3, the figures of section 6)
is edited by hand; its new lines are printed. Exit status 1 if a kernel has too few new Records, or its fit is no better."""
import argparse
import glob
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ACCURACY, FAMILIES = ROOT / "toolkit/measure/accuracy.cc", ROOT / "src/model/families_gpu.cc"
LEAST_ROWS, LEAST_ROWS_OF_DIMS = 20, 8


def records_of():
    names = "forward", "peers", "drawn*", "held_out", "now/*"
    return sorted(path for name in names for path in glob.glob(str(ROOT / f"bench/results/h200/{name}.jsonl")))


def commits_of(schedule, direction, up_to):
    """{commit, seven digits: rows} of tessera's kernel in all Records, of head_dims up to `up_to` (0: all)."""
    rows = {}
    for path in records_of():
        for line in open(path, encoding="utf-8"):
            r = json.loads(line)
            if r.get("kernel") == "cuda.decode.forward":  # refit_decode.py
                continue
            if (r.get("what"), r["by"], r["schedule"], r["pass"]) == ("measured", "tessera", schedule, direction) and (not up_to or max(r["head_dim"], r["head_dim_v"]) <= up_to):
                rows[r["commit"][:7]] = rows.get(r["commit"][:7], 0) + 1
    return rows


def retired(text, schedule, direction, up_to):
    """The match of a kernel's row of kRetired: its commits."""
    return re.search(r'\{Schedule::%s, Pass::%s, "([^"]*)"%s\}' % (schedule, direction, f", {up_to}" if up_to else ""), text)


def retire(kernel, keep, up_to, write):
    schedule, direction = kernel.split()
    text = ACCURACY.read_text()
    row = retired(text, schedule, direction, up_to)
    if row is None:
        sys.exit(f"{ACCURACY}: expected a row of kRetired for {kernel}")
    rows, already = commits_of(schedule, direction, up_to), row[1].split()
    gone = retired(text, schedule, direction, 0)
    already += gone[1].split() if up_to and gone else []
    old = sorted(c for c in rows if c not in keep and c not in already)
    left = {c: n for c, n in rows.items() if c in keep}
    enough = sum(left.values()) >= (LEAST_ROWS_OF_DIMS if up_to else LEAST_ROWS)
    print(f"{kernel}: {'retired' if enough else 'would retire'} {' '.join(f'{c} ({rows[c]} rows)' for c in old) or 'none'}; left {left}")
    if write and enough and old:
        ACCURACY.write_text(text[: row.start(1)] + " ".join(row[1].split() + old) + text[row.end(1):])
    return enough


def build(folder, *targets):
    subprocess.run(["ninja", "-C", folder, "-j2", *targets], check=True, stdout=subprocess.DEVNULL)


def fits(folder, family, free, records=None):
    """fit_model's answer for a family: ({constant: (fitted, now)}, {what: {"now" or "refit": text}})."""
    out = subprocess.run([f"{folder}/bench/fit/fit_model", "--only", family, *(["--free", free] if free else []), *(records or records_of())], capture_output=True, text=True, check=True).stdout
    print(out.rstrip())
    constants = {n: (float(a), float(b)) for n, a, b in re.findall(r"\.(\w+) = (\S+)  \(now (\S+)\)", out)}
    medians = [float(m) for m in re.findall(r"median +([\d.]+) %", out)]
    return constants, medians


def rows_of(text):
    """(match of tessera's row, schedule, pass, over_dim) for each row of the table of families."""
    for row in re.finditer(r'    \{"tessera",\n.*?\n(?=    \{"|\};)', text, re.S):
        schedule, direction = re.search(r"Schedule::(\w+)", row[0])[1], re.search(r"Pass::(\w+)", row[0])[1]
        if re.search(r"\d+,\s*true\},?\s*$", row[0]):
            direction += " few"  # Family::few_queries
        tail = re.search(r"(?:true|false),\s*(\d+)\},?\s*$", row[0])
        yield row, schedule, direction, int(tail[1]) if tail else 0


def tell_apart(kernel, up_to):
    """Restricts the kernel's first row to head_dims up to `up_to`; a copy serves the others."""
    text = FAMILIES.read_text()
    rows = [(row, over) for row, *name, over in rows_of(text) if " ".join(name) == kernel]
    first = next(row for row, over in rows if over == 0)
    if any(over == up_to for _, over in rows):
        return
    copy = re.sub(r"\}\},\s*$", "},\n     false,\n     %d},\n" % up_to, first[0])
    FAMILIES.write_text(text[: first.end()] + copy + text[first.end():])


def families_of(kernel):
    """The names of the families, as fit_model prints them."""
    found = [over for _, *name, over in rows_of(FAMILIES.read_text()) if " ".join(name) == kernel]
    return [f"tessera {kernel}" + (f" over {over}" if over else "") for over in found]


def move(family, constants):
    """Puts the constants into the family's row."""
    text = FAMILIES.read_text()
    for row, schedule, direction, over in rows_of(text):
        if family != f"tessera {schedule} {direction}" + (f" over {over}" if over else ""):
            continue
        block = row[0]
        for name, (value, _) in constants.items():
            block, found = re.subn(r"\.%s = [\d.e+-]+" % name, f".{name} = {float(f'{value:.3g}'):g}", block)
            if not found:
                sys.exit(f"{FAMILIES}: {family} has no {name}")
        FAMILIES.write_text(text[: row.start()] + block + text[row.end():])
        return
    sys.exit(f"{FAMILIES}: expected a row for {family}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="build folder, configured")
    parser.add_argument("--kernel", action="append", required=True, help='"fa2 backward", "fa3 forward", ...; may be repeated')
    parser.add_argument("--new", required=True, help="commit of the new Records, seven digits or more")
    parser.add_argument("--keep", default="", help="further commits whose kernel is still this one, with commas")
    parser.add_argument("--up-to", type=int, default=0, help="head_dims up to which the kernel is another one; all")
    parser.add_argument("--free", default="", help="constants that may move, with commas; all")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder, good = options.build, True
    keep = {c[:7] for c in [options.new, *options.keep.split(",")] if c}
    enough = [kernel for kernel in options.kernel if retire(kernel, keep, options.up_to, options.write)]
    for kernel in set(options.kernel) - set(enough):
        print(f"{kernel}: fewer than {LEAST_ROWS} rows of {', '.join(sorted(keep))}: not fitted")
        good = False
    if options.write and options.up_to:
        for kernel in enough:
            tell_apart(kernel, options.up_to)
    build(folder, "fit_model", "tessera")
    for kernel in enough:
        for family in [f"tessera {kernel}"] if options.up_to else families_of(kernel):
            constants, medians = fits(folder, family, options.free)
            if not constants:
                print(f"{family}: no new rows")
                continue
            better = medians[1] < medians[0]
            print(f"{family}: {'moved' if better and options.write else 'would be moved' if better else 'no better: stays'}")
            good = good and (better or medians[0] < 6)
            if better and options.write:
                move(family, constants)
    build(folder, "tessera", "fit_model")
    page = subprocess.run([f"{folder}/tessera", "roofline", "--accuracy"], capture_output=True, text=True, check=True).stdout
    print(page.split("\nHeld out")[0])
    names = tuple(f"tessera {kernel.split()[0]} " for kernel in options.kernel)
    print("\n".join(line for line in page.splitlines() if line.startswith(names) and "%" in line))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
