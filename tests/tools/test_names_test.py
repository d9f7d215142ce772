#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names of tests: suites in CamelCase, tests in snake_case. tests/kernels/BUGS.md has one entry for each family of
bugs that a name cites (..._bug_7, ..._bug_s7), and names only tests that exist. So do the filters of
tools/gpu_check.

    test_names_test.py TESTS_FOLDER
"""
import pathlib
import re
import sys

TESTS = pathlib.Path(sys.argv[1])
MACRO = re.compile(r"^(TEST|TEST_P|TEST_F|TYPED_TEST|RC_GTEST_PROP|INSTANTIATE_TEST_SUITE_P)\(\s*(\w+),\s*(\w+)",
                   re.MULTILINE)
CAMEL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*")
SNAKE_CASE = re.compile(r"[a-z0-9_]+")
FAMILIES = re.compile(r"_bug_([0-9_]+)$")
SERVING = re.compile(r"_bug_(s[0-9]+)$")


def names():
    """(macro, first name, second name) of every test."""
    for suffix in (".cc", ".cu"):
        for path in sorted(TESTS.rglob(f"*{suffix}")):
            yield from MACRO.findall(path.read_text(encoding="utf-8"))


def style_problems():
    for macro, first, second in names():
        form = CAMEL_CASE if macro.startswith("INSTANTIATE") else SNAKE_CASE
        if not CAMEL_CASE.fullmatch(first) or not form.fullmatch(second):
            yield f"{macro}({first}, {second}): expected a suite in CamelCase, a test in snake_case"


def bug_problems():
    cited = {}  # number -> names of tests
    for _, _, name in names():
        for number in (FAMILIES.search(name) or ("", ""))[1].split("_"):
            if number:
                cited.setdefault(number, set()).add(name)
    page = (TESTS / "kernels/BUGS.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(\d+)\*\* (.*?)(?=^- |^#|\Z)", page, re.MULTILINE | re.DOTALL)
    listed = [number for number, _ in entries]
    for number in sorted(set(cited) | set(listed)):
        if listed.count(number) != 1:
            yield f"bug {number}: expected one entry in BUGS.md, got {listed.count(number)}"
    for number, text in entries:
        named = set(re.findall(r"`(\w+_bug_[0-9_]+)`", text))
        if not named:
            yield f"bug {number}: names no test"
        for name in sorted(named - cited.get(number, set())):
            yield f"bug {number}: there is no test {name} of this family"


def filter_problems():
    """The patterns of tools/gpu_check for compute-sanitizer: each begins with the name of a test, or a part of one."""
    lines = re.findall(r"^SUBSET\+?='(.*)'$", (TESTS.parent / "tools/gpu_check").read_text(), re.MULTILINE)
    known = [f"{first}.{second}" for _, first, second in names()]
    patterns = [pattern for pattern in re.split("[:-]+", "".join(lines)) if pattern]
    if not patterns:
        yield "tools/gpu_check: no SUBSET"
    for pattern in patterns:
        part = pattern.strip("*").removeprefix("AllKernels/").split("*")[0]
        if not any(part in name for name in known):
            yield f"tools/gpu_check: no test has a name with {part!r}, of the pattern {pattern}"


def serving_problems():
    """The families of caches name tests of C++ and of Python, and corner cases."""
    tests = {name for _, _, name in names()}
    for path in (TESTS.parent / "python/tests").glob("test_*.py"):
        tests.update(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    corners = (TESTS.parent / "toolkit/check/corner_cases.cc").read_text(encoding="utf-8")
    known = tests | set(re.findall(r'"(\w+)"', corners))
    page = (TESTS / "kernels/BUGS.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(s\d+)\*\* (.*?)(?=^- |^#|\Z)", page, re.MULTILINE | re.DOTALL)
    for number, text in entries:
        quoted = [name for name in re.findall(r"`([^`]+)`", text) if "/" not in name]
        named = {name.split(".")[-1] for name in quoted} - {"cc", "cu", "py", "hpp"}
        if not named and "before each call" not in text:
            yield f"bug {number}: names no test"
        yield from (f"bug {number}: there is no test {name}" for name in sorted(named - known))
    listed = [number for number, _ in entries]
    for number in {match[1] for match in map(SERVING.search, tests) if match} | set(listed):
        if listed.count(number) != 1:
            yield f"bug {number}: expected one entry in BUGS.md, got {listed.count(number)}"


def main() -> int:
    problems = [*style_problems(), *bug_problems(), *serving_problems(), *filter_problems()]
    print("\n".join(problems) or f"{sum(1 for _ in names())} names ok")
    return 1 if problems or not any(names()) else 0


if __name__ == "__main__":
    sys.exit(main())
