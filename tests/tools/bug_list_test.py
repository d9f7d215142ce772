#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/kernels/BUGS.md has one entry for each family of bugs that a test's name cites, and names only tests that exist.

    bug_list_test.py TESTS_FOLDER
"""
import pathlib
import re
import sys

TESTS = pathlib.Path(sys.argv[1])
TEST_NAME = re.compile(r"^(?:TEST|TEST_P|TEST_F)\(\s*\w+,\s*(\w+_bug_([0-9_]+))\)", re.MULTILINE)


def main() -> int:
    cited = {}  # number -> names of tests
    for path in TESTS.rglob("*_test.cc"):
        for name, numbers in TEST_NAME.findall(path.read_text(encoding="utf-8")):
            for number in numbers.split("_"):
                cited.setdefault(number, set()).add(name)
    page = (TESTS / "kernels/BUGS.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(\d+)\*\* (.*?)(?=^- |^#|\Z)", page, re.MULTILINE | re.DOTALL)
    listed = [number for number, _ in entries]
    problems = [f"{number}: listed more than once" for number in sorted(set(listed)) if listed.count(number) > 1]
    problems += [f"{number}: cited by {sorted(cited[number])}, not listed" for number in sorted(set(cited) - set(listed))]
    for number, text in entries:
        named = set(re.findall(r"`(\w+_bug_[0-9_]+)`", text))
        if not named:
            problems.append(f"{number}: names no test")
        problems += [f"{number}: there is no test {name} of this family" for name in sorted(named - cited.get(number, set()))]
    print("\n".join(problems) or f"{len(entries)} families, {sum(map(len, cited.values()))} citations")
    return 1 if problems or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
