# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of other projects, unchanged but for the device, against tessera; nothing of theirs is in this tree.

    python python/tests/judges/run.py flash-attention FOLDER/flash-attention --count 500 --longest 1024
    python python/tests/judges/run.py flash-attention-3 FOLDER/flash-attention --device cuda --count 1000
    python python/tests/judges/run.py pytorch FOLDER/pytorch --count 1000 -k TestSDPA
    python python/tests/judges/run.py transformers FOLDER/transformers --models llama,gemma2 -k eager_matches_sdpa

flash-attention: a random sample of tests/test_flash_attn.py, without caches and pages, on --device (default cpu), in
this process. flash-attention-3: hopper/test_flash_attn.py, without what flash_attention_3.py names. The suites with
-kvcache: test_flash_attn_kvcache of these files, in fp16 and bf16. pytorch: pytest over test/test_transformers.py with
the provider active. transformers: pytest over tests/models/MODEL/test_modeling_*.py with tessera under the name "sdpa". These two checkouts have to fit the versions that are installed. Several processes
share one sample by --part. requirements.txt names the packages that these suites need beside those of the tests.
Prints what failed and why, then "N passed, N failed, N skipped"; exit status 1 when something failed.
"""
import argparse
import collections
import contextlib
import io
import os
import pathlib
import signal
import sys
import time

FOLDER = pathlib.Path(__file__).parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=["flash-attention", "flash-attention-3", "flash-attention-kvcache",
                                          "flash-attention-3-kvcache", "pytorch", "transformers"])
    parser.add_argument("checkout", type=pathlib.Path, help="the folder of the project's checkout")
    parser.add_argument("--device", default="cpu", help="flash-attention*: in the place of \"cuda\" (default: cpu)")
    parser.add_argument("--count", type=int, default=500, help="cases to draw (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--longest", type=int, default=2**20,
                        help="flash-attention*: draw no case with longer sequences (default: no limit)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--part", default="0/1",
                        help="I/N runs every Nth case of the sample, from the Ith on (default: all)")
    parser.add_argument("--models", default="llama",
                        help="transformers: the folders below tests/models (default: llama)")
    parser.add_argument("--report", type=pathlib.Path, help="write the counts there, too, as JSON (see together.py)")
    parser.add_argument("-k", default=None, help="pytorch, transformers: pytest's selection")
    return parser.parse_args()


def report(counts, reasons, text):
    for (name, why), number in reasons.most_common():
        print(f"  {number:4} x {name}: {why}")
    print(text)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


def judge_flash_attention(options):
    import flash_attention
    import flash_attention_3
    import kvcache
    import sample
    suite = {"flash-attention": flash_attention, "flash-attention-3": flash_attention_3,
             "flash-attention-kvcache": kvcache.Of2, "flash-attention-3-kvcache": kvcache.Of3}[options.suite]
    module = suite.load(options.checkout, options.device)
    drawn, total = flash_attention.cases(module, suite.is_asked, options.count, options.seed, options.longest)
    if options.suite.endswith("kvcache"):
        drawn = kvcache.with_both_dtypes(drawn)
    part, parts = map(int, options.part.split("/"))
    counts, reasons, begun = collections.Counter(), collections.Counter(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: setattr(options, "minutes", 0))  # ends after the case it is at
    for function, case in drawn[part::parts]:
        if time.monotonic() - begun > 60 * options.minutes:
            counts["not run"] += 1
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            result, why = flash_attention.run(function, case)
        counts[result] += 1
        if result != "passed":
            reasons[function.__name__, f"{result}: {why[:200]}"] += 1
        if result == "failed":
            print(f"failed: {function.__name__} {case}\n        {why[:300]}", flush=True)
        sample.free_memory()
        if sys.stderr.isatty():
            print(f"\r{sum(counts.values())} of {len(drawn)}", end="", file=sys.stderr)
    if options.report:
        sample.write_report(options.report, suite=options.suite, seed=options.seed, part=options.part,
                            counts=dict(counts), reasons=[(f"{name}: {why}", n) for (name, why), n in
                                                          reasons.most_common()])
    return report(counts, reasons, f"{len(drawn)} of {total:,} cases drawn (seed {options.seed}, sequences up to "
                  f"{options.longest}), part {options.part}; {counts['not run']} of the part not run for want of time")


def judge_by_pytest(options):
    """The suites that are pytest's, each with the plugin that puts tessera in; sample.py draws and reports. Becomes
    pytest."""
    if options.suite == "pytorch":
        plugin, tests = "pytorch_provider", [options.checkout / "test" / "test_transformers.py"]
    else:
        plugin, folder = "transformers_sdpa", options.checkout / "tests" / "models"
        tests = [t for model in options.models.split(",") for t in sorted((folder / model).glob("test_modeling_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sample", "-p", plugin, "-o", "addopts=", "--tb=short",
               "-p", "no:cacheprovider", f"--sample={options.count}", f"--sample-seed={options.seed}",
               f"--sample-part={options.part}", f"--sample-minutes={options.minutes}", *map(str, tests)]
    if options.report:
        command += [f"--sample-report={options.report.absolute()}", f"--sample-suite={options.suite}"]
    if options.k:
        command += ["-k", options.k]
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    os.chdir(options.checkout)
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})  # so that signals reach pytest


if __name__ == "__main__":
    chosen = arguments()
    sys.exit(judge_flash_attention(chosen) if chosen.suite.startswith("flash") else judge_by_pytest(chosen))
