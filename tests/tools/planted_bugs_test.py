#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/planted_bugs.py tells a bug that no longer finds its place, and has as many bugs as its trials need."""
import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(ROOT / "tools"))
import planted_bugs  # noqa: E402

LEAST = {"python": 20, "cpu": 10, "cuda": 30}


def main() -> int:
    failures = []
    for kind, least in LEAST.items():
        if len(planted_bugs.bugs_of(kind)) < least:
            failures.append(f"{kind}: fewer than {least} bugs")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for kind in LEAST:
            for bug in planted_bugs.bugs_of(kind):
                for file in (bug.file, *(f"python/tests/{test}" for test in bug.tests if kind == "python")):
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / file, copy / file)
        page = copy / "tests/PLANTED.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests/PLANTED.md", page)
        failures += planted_bugs.check(copy)
        bug = planted_bugs.bugs_of("cuda")[0]
        path = copy / bug.file
        text = path.read_text()
        if planted_bugs.plant(bug, path) != text or path.read_text() != text.replace(bug.old, bug.new):
            failures.append("plant() does not write the bug, or does not return the text without it")
        try:
            planted_bugs.plant(bug, path)
            failures.append("a bug is planted twice")
        except SystemExit as stop:
            if stop.code != 2:
                failures.append(f"a stale bug ends with status {stop.code}")
        for wrong, times in ((text.replace(bug.old, ""), 0), (text + bug.old, 2)):
            path.write_text(wrong)
            expected = f"{bug.name}: expected its old text once in {bug.file}, found it {times} times"
            if planted_bugs.check(copy) != [expected]:
                failures.append(f"expected {expected!r}, got {planted_bugs.check(copy)}")
        path.write_text(text)
        listed = page.read_text()
        for wrong, expected in ((listed.replace(f"| {bug.name} |", "| another_bug |"),
                                 [f"{bug.name}: no row in tests/PLANTED.md",
                                  "another_bug: in tests/PLANTED.md, and in no list"]),
                                (listed + f"| {bug.name} | | | |\n", [f"{bug.name}: two rows in tests/PLANTED.md"])):
            page.write_text(wrong)
            if planted_bugs.check(copy) != expected:
                failures.append(f"expected {expected!r}, got {planted_bugs.check(copy)}")
        page.write_text(listed)
        path.unlink()
        if planted_bugs.check(copy)[:1] != [f"{bug.name}: no file {bug.file}"]:
            failures.append("a file that is gone is not told")
    for output, name in (("[ RUN      ] A.b\n[  FAILED  ] A.b, where GetParam() = 1 (2 ms)\n", "A.b"),
                         ("tessera check --kernel cpu.fa2.forward --seed 9\n", "tessera check --kernel cpu.fa2.forward --seed 9"),
                         ("[  PASSED  ] 3 tests.\n", "")):
        if planted_bugs.first_failure(output) != name:
            failures.append(f"expected the failure {name!r}, got {planted_bugs.first_failure(output)!r}")
    print("\n".join(failures) or "ok")
    return 1 if failures else 0


sys.exit(main())
