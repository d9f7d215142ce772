#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums up a run of ctest: the tests that were skipped and why, that failed, and that took longest.

    tools/test_summary.py [--slowest N] [--known PASSED,SKIPPED,FAILED] [NAME=FOLDER...]

FOLDER is a build folder after `ctest --output-junit FOLDER/ctest.xml`. A part of a GoogleTest program counts as the
tests that it ran (FOLDER/results/PART.xml), any other test of ctest's as one. A part that failed without a failed test crashed
or hung, and counts as one failure. FOLDER/ctest.xml may also be the output of pytest --junitxml.
FOLDER/status, if it exists, is the exit status of the run. A stage counts one failure when it has no results, results
that cannot be read, or a status other than 0 without a failed test.
The last line is "N passed, M skipped, K failed"; the exit status is 1 if K is not 0. Without a stage nothing ran, which
counts as one failure. --known adds checks that ctest did not run.
"""
import argparse
import collections
import dataclasses
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


@dataclasses.dataclass
class Result:
    name: str
    seconds: float
    state: str  # "passed", "skipped" or "failed"
    reason: str = ""  # why it was skipped


def first_line(text: str) -> str:
    """Returns the first line of GoogleTest's message after its location, FILE:LINE."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and re.fullmatch(r".+:\d+", lines[0]):
        lines = lines[1:]
    return lines[0] if lines else "no reason was given"


def of_gtest(path: pathlib.Path) -> list[Result]:
    results = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.get("status") == "notrun":
            continue
        name, seconds = f"{case.get('classname')}.{case.get('name')}", float(case.get("time", 0))
        skipped = case.find("skipped")
        if case.find("failure") is not None:
            results.append(Result(name, seconds, "failed"))
        elif skipped is not None:
            results.append(Result(name, seconds, "skipped", first_line(skipped.get("message") or skipped.text or "")))
        else:
            results.append(Result(name, seconds, "passed"))
    return results


def of_ctest(case: ElementTree.Element) -> Result:
    name, seconds = case.get("name"), float(case.get("time", 0))
    if case.get("status") == "fail" or case.find("failure") is not None or case.find("error") is not None:
        return Result(name, seconds, "failed")
    skipped = case.find("skipped")
    message = skipped.get("message", "") if skipped is not None else ""
    # ctest also reports "notrun" for a missing program. The message of a test that skips itself has SKIP_RETURN_CODE or
    # SKIP_REGULAR_EXPRESSION.
    if case.get("status") == "notrun" and not message.startswith("SKIP_"):
        return Result(f"{name} (not run: {message or 'no reason was given'})", seconds, "failed")
    if skipped is not None:
        return Result(name, seconds, "skipped", first_line(case.findtext("system-out") or message))
    return Result(name, seconds, "passed")


def of_case(folder: pathlib.Path, case: ElementTree.Element) -> list[Result]:
    whole = of_ctest(case)
    parts = folder / "results" / f"{case.get('name')}.xml"
    crashed = Result(f"{whole.name} (crashed, hung or did not start)", whole.seconds, "failed")
    if not parts.exists():
        # tessera_add_shards() gives each part of a GoogleTest program a number and a file of results.
        is_part = re.fullmatch(r".+\.\d+", case.get("name", "")) is not None
        if is_part and case.get("status") == "run":
            return [Result(f"{whole.name} (passed, but left no results)", whole.seconds, "failed")]
        return [crashed if is_part and case.get("status") == "fail" else whole]
    inside = of_gtest(parts)
    if whole.state == "failed" and not any(r.state == "failed" for r in inside):
        inside.append(crashed)
    return inside


def read(folder: pathlib.Path) -> list[Result]:
    status = (folder / "status").read_text(encoding="utf-8").strip() if (folder / "status").exists() else "0"
    ended = "" if status == "0" else f" (it ended with status {status})"
    if not (folder / "ctest.xml").exists():
        return [Result(f"no results in {folder}{ended}", 0, "failed")]
    try:
        cases = list(ElementTree.parse(folder / "ctest.xml").getroot().iter("testcase"))
        results = [result for case in cases for result in of_case(folder, case)]
    except ElementTree.ParseError as error:
        return [Result(f"results in {folder} that cannot be read: {error}{ended}", 0, "failed")]
    if not results:
        return [Result(f"no test ran in {folder}{ended}", 0, "failed")]
    if ended and not any(r.state == "failed" for r in results):
        results.append(Result(f"no test of {folder} failed, but it ended with status {status}", 0, "failed"))
    return results


def print_calls(folder: pathlib.Path) -> None:
    """Prints how often kernels ran in tests that call all of them, by the programs' reports
    (tests/kernels/all_kernels_test.cc)."""
    ran, refused = collections.Counter(), collections.Counter()
    for path in sorted((folder / "results").glob("*.xml")):
        try:
            attributes = ElementTree.parse(path).getroot().attrib
        except ElementTree.ParseError:
            continue  # read() counts it as failed
        for name, value in attributes.items():
            if name.startswith("ran_"):
                ran[name[4:]] += int(value)
            if name.startswith("refused_"):
                refused[name[8:]] += int(value)
    if ran:
        print("\ncalls in tests that ask every kernel:")
    for kernel in sorted(ran):
        print(f"{ran[kernel]:8} ran, {refused[kernel]:6} refused  {kernel}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slowest", type=int, default=15)
    parser.add_argument("--known", default="0,0,0")
    parser.add_argument("stages", nargs="*", metavar="NAME=FOLDER")
    options = parser.parse_args()
    passed, skipped, failed = (int(n) for n in options.known.split(","))
    total = collections.Counter(passed=passed, skipped=skipped, failed=failed)
    every: list[tuple[str, Result]] = []
    print(f"{'':30} {'passed':>7} {'skipped':>8} {'failed':>7} {'seconds':>8}")
    for stage in options.stages:
        name, folder = stage.split("=", 1)
        results = read(pathlib.Path(folder))
        states = collections.Counter(r.state for r in results)
        total += states
        every += [(name, r) for r in results]
        seconds = sum(r.seconds for r in results)
        print(f"{name:30} {states['passed']:7} {states['skipped']:8} {states['failed']:7} {seconds:8.0f}")
    print("\nslowest tests, in seconds on a machine that does other things too:")
    for name, result in sorted(every, key=lambda entry: -entry[1].seconds)[: options.slowest]:
        print(f"{result.seconds:8.1f}  {name}: {result.name}")
    if options.stages:
        print_calls(pathlib.Path(options.stages[0].split("=", 1)[1]))
    else:
        print("failed: nothing ran")
        total["failed"] += 1
    why = collections.Counter((name, r.reason) for name, r in every if r.state == "skipped")
    if why:
        print()
    for (name, reason), count in why.most_common():
        print(f"skipped: {count} of {name}: {reason}")
    for name, result in every:
        if result.state == "failed":
            print(f"failed: {name}: {result.name}")
    print(f"{total['passed']} passed, {total['skipped']} skipped, {total['failed']} failed")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
