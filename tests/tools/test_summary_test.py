#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/test_summary.py counts what ran, and nothing that was skipped or crashed as passed."""
import pathlib
import subprocess
import sys
import tempfile

SUMMARY = pathlib.Path(sys.argv[1])

# Output of ctest: a program in two parts, of which the second one crashed, and two scripts, one of them skipped.
CTEST = """<testsuite>
  <testcase name="kernels_test.0" time="3" status="run"><system-out/></testcase>
  <testcase name="kernels_test.1" time="2" status="fail"><failure message="SEGFAULT"/><system-out/></testcase>
  <testcase name="check_layers" time="1" status="run"><system-out/></testcase>
  <testcase name="check_loops" time="0" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>
    <system-out>no objdump here
</system-out></testcase>
</testsuite>"""
# Output of GoogleTest for one part, with the tests that another part has.
PART = """<testsuites><testsuite>
  <testcase name="right" status="run" time="2.5" classname="Suite"/>
  <testcase name="elsewhere" status="notrun" time="0" classname="Suite"/>
  <testcase name="on_gpu" status="run" result="skipped" time="0" classname="Suite">
    <skipped message="/a/b_test.cc:12&#x0A;no CUDA device: none&#x0A;"/></testcase>
  {}
</testsuite></testsuites>"""
# Output of pytest. An error is one outside the test itself.
PYTEST = """<testsuites><testsuite name="pytest">
  <testcase classname="test_a" name="right" time="1"/>
  <testcase classname="test_a" name="broken" time="0"><error message="failed on setup">E</error></testcase>
  <testcase classname="test_b" name="without" time="0"><skipped type="pytest.skip" message="no torch">b.py:1</skipped></testcase>
</testsuite></testsuites>"""
ONE = '<testsuites><testsuite><testcase name="one" status="run" time="1" classname="Suite"/></testsuite></testsuites>'
WRONG = '<testcase name="wrong" status="run" time="0" classname="Suite"><failure message="x"/></testcase>'


def run(ctest, results, *options, ended=None):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        if ctest:
            (path / "ctest.xml").write_text(ctest, encoding="utf-8")
        if ended:
            (path / "status").write_text(ended + "\n", encoding="utf-8")
        (path / "results").mkdir()
        for name, text in results.items():
            (path / "results" / name).write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, SUMMARY, *options, f"release={folder}"], capture_output=True, text=True,
                              check=False)
        return done.returncode, done.stdout + done.stderr


def main() -> int:
    failures = []

    def expect(what, status, output, wanted_status, *pieces):
        if status != wanted_status:
            failures.append(f"{what}: status {status}\n{output}")
        failures.extend(f"{what}: no {piece!r} in\n{output}" for piece in pieces if piece not in output)

    only_good = CTEST.replace('status="fail"><failure message="SEGFAULT"/>', 'status="run">')
    both = {"kernels_test.0.xml": PART.format(""), "kernels_test.1.xml": ONE}
    status, output = run(only_good, both)
    expect("skipped tests", status, output, 0, "3 passed, 2 skipped, 0 failed\n",
           "skipped: 1 of release: no CUDA device: none", "skipped: 1 of release: no objdump here")
    status, output = run(CTEST, {"kernels_test.0.xml": PART.format("")})
    expect("a crash", status, output, 1, "2 passed, 2 skipped, 1 failed\n", "failed: release: kernels_test.1 (crashed")
    status, output = run(only_good, {"kernels_test.0.xml": PART.format(WRONG), "kernels_test.1.xml": ONE})
    expect("a failure", status, output, 1, "3 passed, 2 skipped, 1 failed\n", "failed: release: Suite.wrong")
    status, output = run(only_good, both, "--known", "2,1,1")
    expect("known", status, output, 1, "5 passed, 3 skipped, 1 failed\n")
    status, output = run(only_good, {"kernels_test.0.xml": PART.format("")})
    expect("a part without results", status, output, 1, "2 passed, 2 skipped, 1 failed\n",
           "failed: release: kernels_test.1 (passed, but left no results)")
    missing = only_good.replace("SKIP_RETURN_CODE=77", "Unable to find executable")
    status, output = run(missing, both)
    expect("a program that is missing", status, output, 1, "3 passed, 1 skipped, 1 failed\n",
           "failed: release: check_loops (not run: Unable to find executable)")
    status, output = run(only_good, both, ended="8")
    expect("a status without a failed test", status, output, 1, "3 passed, 2 skipped, 1 failed\n", "status 8")
    status, output = run(only_good, both, ended="0")
    expect("status 0", status, output, 0, "3 passed, 2 skipped, 0 failed\n")
    status, output = run(only_good[:200], both)
    expect("half of the results", status, output, 1, "0 passed, 0 skipped, 1 failed\n", "that cannot be read")
    status, output = run(only_good, {**both, "kernels_test.1.xml": ONE[:20]})
    expect("half of a part's results", status, output, 1, "0 passed, 0 skipped, 1 failed\n", "that cannot be read")
    status, output = run(PYTEST, {})
    expect("pytest", status, output, 1, "1 passed, 1 skipped, 1 failed\n", "skipped: 1 of release: no torch")
    status, output = run(None, {})
    expect("nothing ran", status, output, 1, "0 passed, 0 skipped, 1 failed\n")
    print("\n".join(failures) if failures else "ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
