#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/stages.sh counts a stage that breaks as failed, and as skipped only one that says that it cannot run here."""
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1])

# Replaces the programs that a stage runs, with the files that they leave in FOLDER and their exit status.
BEGIN = r"""
source "$1/scripts/setup.sh"
source scripts/stages.sh
FOLDER=$2
GOOD='<testsuite><testcase name="good" time="1"/></testsuite>'
BAD='<testsuite><testcase name="bad" time="1"><failure message="x"/></testcase></testsuite>'
configure_and_build() { return "${BUILD_STATUS:-0}"; }
ctest() { [[ -z ${RESULTS:-} ]] || echo "$RESULTS" >"$FOLDER/ctest.xml"; return "${CTEST_STATUS:-0}"; }
a_script() { [[ -z ${RESULTS:-} ]] || echo "$RESULTS" >"$FOLDER/ctest.xml"; echo "the last line"; return "$1"; }
"""
NO_RESULTS = '0 passed, 0 skipped, 1 failed\n'
# Command -> the exit status, and pieces of the summary.
CASES = {
    'RESULTS=$GOOD; tests release "$FOLDER"': (0, ["1 passed, 0 skipped, 0 failed\n", "release: tests"]),
    'RESULTS=$BAD; CTEST_STATUS=8; tests release "$FOLDER"': (1, ["0 passed, 0 skipped, 1 failed\n", "failed: release: bad"]),
    'RESULTS=$GOOD; CTEST_STATUS=8; tests release "$FOLDER"': (1, ["1 passed, 0 skipped, 1 failed\n", "status 8"]),
    'RESULTS=; CTEST_STATUS=1; tests release "$FOLDER"': (1, [NO_RESULTS, "no results"]),
    'RESULTS="<testsuite/>"; tests release "$FOLDER"': (1, [NO_RESULTS, "no test ran"]),
    'RESULTS=$GOOD; script page "$FOLDER" a_script 0': (0, ["1 passed, 0 skipped, 0 failed\n"]),
    'RESULTS=$BAD; script page "$FOLDER" a_script 1': (1, ["0 passed, 0 skipped, 1 failed\n", "failed: page: bad"]),
    # pytest's internal error, an interruption, a command that is missing: with results or without.
    'RESULTS=; script page "$FOLDER" a_script 3': (1, [NO_RESULTS, "status 3"]),
    'RESULTS=$GOOD; script page "$FOLDER" a_script 3': (1, ["1 passed, 0 skipped, 1 failed\n", "status 3"]),
    'RESULTS=$GOOD; script page "$FOLDER" a_script 2': (1, ["1 passed, 0 skipped, 1 failed\n", "status 2"]),
    'script page "$FOLDER" no_such_command': (1, [NO_RESULTS, "status 127"]),
    # Results of an earlier run are not taken for those of this one.
    'echo "$GOOD" >"$FOLDER/ctest.xml"; script page "$FOLDER" a_script 1': (1, [NO_RESULTS, "no results"]),
    'echo "$GOOD" >"$FOLDER/ctest.xml"; CTEST_STATUS=1; tests release "$FOLDER"': (1, [NO_RESULTS, "no results"]),
    # A stage that cannot run here is skipped, with the reason, beside one that ran.
    'RESULTS=$GOOD; tests release "$FOLDER"; script page "$FOLDER/page" a_script "$CANNOT"':
        (0, ["1 passed, 1 skipped, 0 failed\n", "skipped: page: the last line\n"]),
    'RESULTS=$GOOD; tests release "$FOLDER"; skip format "clang-format-14 is not here"':
        (0, ["1 passed, 1 skipped, 0 failed\n", "skipped: format: clang-format-14 is not here\n"]),
    'script page "$FOLDER" a_script "$CANNOT"': (1, ["nothing ran", "0 passed, 1 skipped, 1 failed\n"]),
    'RESULTS=$GOOD; BUILD_STATUS=1; build release "$FOLDER" || tests other "$FOLDER"':
        (1, ["1 passed, 0 skipped, 1 failed\n", "failed: release: build\n", "release: build"]),
    'RESULTS=$GOOD; build release "$FOLDER" && tests release "$FOLDER"': (0, ["1 passed, 0 skipped, 0 failed\n"]),
    'RESULTS=$GOOD; tests release "$FOLDER"; problem layers': (1, ["1 passed, 0 skipped, 1 failed\n", "failed: layers\n"]),
}


def main() -> int:
    failures = []
    for what, (wanted, pieces) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(["bash", "-c", BEGIN + what + "\nsum", "bash", str(ROOT), folder], capture_output=True,
                                  text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode != wanted:
            failures.append(f"{what}: expected status {wanted}, got {done.returncode}\n{output}")
        failures += [f"{what}: no {piece!r} in\n{output}" for piece in pieces + ["seconds by stage"] if piece not in output]
    print("\n".join(failures) if failures else "ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
