# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for the suites of other projects: runs a sample of what pytest collected, in random order, stops when
the time is over, and says what failed and why, and how many of the tests called tessera."""
import collections
import json
import random
import time

import pytest
import torch

MOST_RESERVED = 6 << 30  # bytes of a GPU that a process may keep between two cases
calls = 0  # calls of tessera, which the plugin of a suite counts by counted()


def counted(function):
    """`function`, which runs tessera, with its calls counted."""
    def call(*args, **kwargs):
        global calls
        calls += 1
        return function(*args, **kwargs)
    return call


def pytest_addoption(parser):
    group = parser.getgroup("judges")
    group.addoption("--sample", type=int, default=None, help="tests to draw (default: all)")
    group.addoption("--sample-seed", type=int, default=0)
    group.addoption("--sample-part", default="0/1", help="I/N: every Nth of the sample, from the Ith on")
    group.addoption("--sample-minutes", type=float, default=1e9)
    group.addoption("--sample-report", help="write the counts there, too, as JSON")
    group.addoption("--sample-suite", default="", help="the name of the suite in that report")


@pytest.hookimpl(trylast=True)  # after -k has chosen
def pytest_collection_modifyitems(config, items):
    total = len(items)
    count, seed = config.getoption("sample"), config.getoption("sample_seed")
    part, parts = map(int, config.getoption("sample_part").split("/"))
    chosen = random.Random(seed).sample(items, total if count is None else min(count, total))[part::parts]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen
    config.stash[_SAMPLE] = f"{len(chosen)} of {total} cases drawn (seed {seed}, part {part}/{parts})", len(chosen)


def write_report(file, **facts):
    with open(file, "w") as to:
        json.dump(facts, to, indent=1)


def free_memory():
    """Returns the allocator's cached memory after a large case, since other processes need it."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()


_SAMPLE = pytest.StashKey()
_begun = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = calls
    try:
        return (yield)
    finally:
        item.user_properties.append(("tessera", calls - before))


def pytest_runtest_teardown(item):
    free_memory()
    if time.monotonic() - _begun > 60 * item.config.getoption("sample_minutes"):
        item.session.shouldstop = "the time is over"


def _reason(report):
    """The line of pytest's summary: the exception and the first line of its message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().splitlines()[0][:200]


def pytest_terminal_summary(terminalreporter):
    reports = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")}
    failed = reports["failed"] + reports["error"]
    reasons = collections.Counter((report.nodeid.split("::")[-1].split("_cuda")[0].split("_cpu")[0][:60],
                                   _reason(report)) for report in failed)
    skips = collections.Counter(str(report.longrepr[2])[:120] for report in reports["skipped"])
    write = terminalreporter.write_line
    for (name, why), number in reasons.most_common():
        write(f"  {number:4} x {name}: failed: {why}")
    for why, number in skips.most_common():
        write(f"  {number:4} x skipped: {why}")
    done = len(failed) + len(reports["passed"]) + len(reports["skipped"])
    text, chosen = terminalreporter.config.stash.get(_SAMPLE, ("nothing collected", 0))
    ran = [r for r in reports["passed"] + failed if dict(getattr(r, "user_properties", ())).get("tessera")]
    config = terminalreporter.config
    if config.getoption("sample_report"):
        counts = dict(passed=len(reports["passed"]), failed=len(failed), skipped=len(reports["skipped"]),
                      called=sum(r.passed for r in ran))
        counts["not run"] = max(0, chosen - done)
        write_report(config.getoption("sample_report"), suite=config.getoption("sample_suite"),
                     seed=config.getoption("sample_seed"), part=config.getoption("sample_part"), counts=counts,
                     reasons=[(f"{name}: failed: {why}", n) for (name, why), n in reasons.most_common()] +
                             [(f"skipped: {why}", n) for why, n in skips.most_common()])
    write(f"{text}; {max(0, chosen - done)} not run for want of time")
    write(f"called tessera: {sum(r.passed for r in ran)} that passed, {sum(r.failed for r in ran)} that failed")
    write(f"{len(reports['passed'])} passed, {len(failed)} failed, {len(reports['skipped'])} skipped")
