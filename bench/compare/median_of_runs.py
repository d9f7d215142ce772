#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Merges Records of the same cases from several runs into one each. A disturbance of seconds slows one run, not the median.

    python3 bench/compare/median_of_runs.py run1.jsonl run2.jsonl run3.jsonl > records.jsonl

The time of a case is the median of its runs, its spread the widest of theirs or of the runs among each other; stderr shows the
median difference of two runs of a case."""
import json
import statistics
import sys


def case_of(record):
    timed = ("ms", "ms_spread", "tflops", "percent_of_bound", "clock_mhz", "watts", "date")
    return json.dumps({k: v for k, v in record.items() if k not in timed}, sort_keys=True)


def main():
    cases, apart = {}, []
    for path in sys.argv[1:]:
        for line in open(path, encoding="utf-8"):
            record = json.loads(line)
            if record["what"] == "measured":
                cases.setdefault(case_of(record), []).append(record)
    for runs in cases.values():
        times = sorted(r["ms"] for r in runs)
        apart += [abs(b["ms"] / a["ms"] - 1) for a, b in zip(runs, runs[1:])]
        kept = dict(runs[-1], ms=statistics.median(times))
        kept["tflops"] = kept["tflops"] * runs[-1]["ms"] / kept["ms"]
        kept["ms_spread"] = max([r["ms_spread"] for r in runs] + [(times[-1] - times[0]) / 2])
        kept.pop("percent_of_bound", None)
        print(json.dumps(kept))
    if apart:
        print(f"{len(cases)} cases; a run and the next are {100 * statistics.median(apart):.1f} % apart in the median", file=sys.stderr)


if __name__ == "__main__":
    main()
