#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs one by one and says which test catches each. tests/PLANTED.md has the results.

  tools/planted_bugs.py check                       every old text stands exactly once in its file, and every bug has a
                                                    row in tests/PLANTED.md (CTest runs this)
  tools/planted_bugs.py list python|cpu|cuda        the bugs and the tests that ought to catch them
  tools/planted_bugs.py python FOLDER [NAME...]     FOLDER: an unpacked wheel. Each bug is planted in a copy of it, and
                                                    the tests of the bug run with this Python, which has what they need
  tools/planted_bugs.py python-only FOLDER ...      the same without a first run of the tests without a bug
  tools/planted_bugs.py cpu|cuda BUILD [NAME...]    each bug is planted in this checkout, its tests run after a build in
                                                    BUILD, and the file is restored; cuda needs a GPU

Prints a row of a table for each bug. Exit status: 0 when every bug was caught, 1 when one survived, 2 when a list is
stale, a test failed without a bug or a bug does not compile.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
KINDS = ("python", "cpu", "cuda")


class Bug(typing.NamedTuple):
    """A change of one place in the source. tests: files of python/tests, or commands run in the build folder."""
    name: str
    file: str
    old: str
    new: str
    tests: tuple


def bugs_of(kind: str) -> list:
    module = __import__("planted_bugs_" + kind)
    return [Bug(*row) for row in module.BUGS]


def stale(bug: Bug, text: str) -> str:
    """Why the bug cannot be planted in this text of its file; empty if it can."""
    if bug.old == bug.new:
        return f"{bug.name}: old and new text are equal"
    count = text.count(bug.old)
    return "" if count == 1 else f"{bug.name}: expected its old text once in {bug.file}, found it {count} times"


def unlisted(names: set, page: str) -> list:
    """Bugs without a row on the page, and rows without a bug."""
    rows = re.findall(r"^\| (\w+) \|", page, re.M)
    return [*(f"{name}: no row in tests/PLANTED.md" for name in sorted(names - set(rows))),
            *(f"{name}: in tests/PLANTED.md, and in no list" for name in sorted(set(rows) - names - {"bug"})),
            *(f"{name}: two rows in tests/PLANTED.md" for name in sorted(set(rows) - {"bug"}) if rows.count(name) > 1)]


def check(root: pathlib.Path) -> list:
    """Every reason why a list or the page is stale."""
    problems = []
    names = set()
    for kind in KINDS:
        for bug in bugs_of(kind):
            if bug.name in names:
                problems.append(f"{bug.name}: two bugs have this name")
            names.add(bug.name)
            path = root / bug.file
            problems.append(stale(bug, path.read_text()) if path.is_file() else f"{bug.name}: no file {bug.file}")
            if kind == "python":
                problems += [f"{bug.name}: no file python/tests/{test}" for test in bug.tests
                             if not (root / "python/tests" / test.split("::")[0]).is_file()]
    page = root / "tests/PLANTED.md"
    problems += unlisted(names, page.read_text()) if page.is_file() else ["no file tests/PLANTED.md"]
    return [problem for problem in problems if problem]


def chosen(kind: str, names: list) -> list:
    bugs = bugs_of(kind)
    unknown = set(names) - {bug.name for bug in bugs}
    if unknown:
        sys.exit(f"no such bug: {', '.join(sorted(unknown))}")
    return [bug for bug in bugs if not names or bug.name in names]


def plant(bug: Bug, path: pathlib.Path) -> str:
    """Writes the bug into this copy of its file and returns the text without it. A stale bug ends the program."""
    text = path.read_text()
    if problem := stale(bug, text):
        print(problem)
        sys.exit(2)
    path.write_text(text.replace(bug.old, bug.new))
    return text


def first_failure(output: str) -> str:
    """The test that a GoogleTest program, or the case that `tessera check`, names as failed; empty if there is none."""
    failed = re.search(r"^\[  FAILED  \] ([^,\s]+)|^(tessera check --kernel .*)", output, re.M)
    return (failed.group(1) or failed.group(2)) if failed else ""


def row(bug: Bug, caught_by: str) -> None:
    """Prints the row of a bug; without a test that caught it, that it survived."""
    caught_by = caught_by or "**survived**"
    print(f"| {bug.name} | {bug.file} | {caught_by} |", flush=True)


def run_pytest(package: pathlib.Path, tests: tuple) -> tuple:
    """(status, first test that failed) of the tests on this package."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
               "--rootdir", str(ROOT), *(str(ROOT / "python/tests" / test) for test in tests)]
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    test = failed.group(1) if failed else done.stdout[-300:]
    return done.returncode, test.rpartition("python/tests/")[2]


def trial_python(folder: str, names: list, first_without: bool) -> int:
    survived = 0
    bugs = chosen("python", names)
    if first_without:
        status, test = run_pytest(pathlib.Path(folder).resolve(), tuple(sorted({t for bug in bugs for t in bug.tests})))
        if status != 0:
            print(f"fails without a bug: {test}")
            return 2
    for bug in bugs:
        with tempfile.TemporaryDirectory() as copy:
            package = pathlib.Path(copy) / "package"
            shutil.copytree(folder, package, symlinks=True)
            plant(bug, package / bug.file.removeprefix("python/"))
            status, test = run_pytest(package, bug.tests)
        row(bug, test if status == 1 else f"pytest's status {status}: {test}" if status else "")
        survived += status == 0
    return 1 if survived else 0


def targets_of(tests: tuple) -> list:
    """The programs that these commands run."""
    programs = {shlex.split(test)[0].rpartition("/")[2] for test in tests}
    return sorted("tessera_cli" if program == "tessera" else program for program in programs)


def trial_built(kind: str, build: str, names: list) -> int:
    survived = 0
    for bug in chosen(kind, names):
        path = ROOT / bug.file
        text = plant(bug, path)
        try:
            built = subprocess.run(["ninja", "-C", build, *targets_of(bug.tests)], capture_output=True, text=True,
                                   check=False)
            if built.returncode != 0:
                row(bug, "does not compile")
                print(built.stdout[-3000:])
                return 2
            caught = []
            for test in bug.tests:
                done = subprocess.run(shlex.split(test), cwd=build, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    caught.append(f"`{first_failure(done.stdout) or test}`")
            row(bug, "; ".join(caught))
            survived += not caught
        finally:
            path.write_text(text)
    return 1 if survived else 0


def main(arguments: list) -> int:
    command, *rest = arguments or ["help"]
    if command == "check":
        problems = check(pathlib.Path(rest[0]) if rest else ROOT)
        print("\n".join(problems) if problems else "every planted bug finds its place")
        return 2 if problems else 0
    if command == "list" and rest:
        for bug in bugs_of(rest[0]):
            row(bug, ", ".join(bug.tests))
        return 0
    if command in ("python", "python-only") and rest:
        return trial_python(rest[0], rest[1:], command == "python")
    if command in ("cpu", "cuda") and rest:
        return trial_built(command, rest[0], rest[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
