#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes Records of the timings of host_rounds: the median over rounds of each call, with calibrate's calls and the drawn ones in
separate files.

    build/bench/fit/host_rounds --roofs roofs.machine.json
    build/bench/fit/host_rounds --seconds 150 drawn.jsonl > rounds.jsonl
    python3 bench/fit/medians_of_rounds.py rounds.jsonl --probes probes_11.jsonl --drawn blind_11.jsonl
    cp roofs.machine.json probes_11.machine.json && cp roofs.machine.json blind_11.machine.json
    build/bench/fit/fit_model --host --write blind_11.machine.json probes_11.jsonl blind_11.jsonl

stderr shows, by threads, the deviation of a call's runs from their median, and the deviation of the medians of every other run
from those of the rest."""
import argparse
import collections
import json
import math
import statistics
import sys

OF_A_RUN = ("name", "round", "at", "all_ms", "own_ms", "before", "after")
OF_A_TIME = ("ms", "ms_spread", "tflops", "date", "percent_of_bound", "clock_mhz")


def case_of(run):
    return json.dumps({k: v for k, v in run.items() if k not in OF_A_RUN + OF_A_TIME}, sort_keys=True)


def time_of(run):
    return statistics.median(run["all_ms"])


def record_of(runs, device, commit):
    times = sorted(map(time_of, runs))
    record = {k: v for k, v in runs[0].items() if k not in OF_A_RUN + ("drawn", "tflops")}
    record["ms"] = statistics.median(times)
    record["ms_spread"] = times[3 * len(times) // 4] - times[len(times) // 4]
    if device:
        record["device"] = device
    if commit:
        record["commit"] = commit
    return record


def say_noise(cases):
    single, halves = collections.defaultdict(list), collections.defaultdict(list)
    for runs in cases.values():
        times = list(map(time_of, runs))
        threads = runs[0].get("threads", 1)
        single[threads] += [abs(math.log(t / statistics.median(times))) for t in times]
        if len(times) >= 4:
            halves[threads].append(abs(math.log(statistics.median(times[::2]) / statistics.median(times[1::2]))))
    for threads in sorted(single):
        text = f"{threads} threads: a run is {100 * statistics.median(single[threads]):.1f} % off its median"
        if halves[threads]:
            text += f", medians of halves {100 * statistics.median(halves[threads]):.1f} % off each other"
        print(text, file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="+", help="what host_rounds wrote")
    parser.add_argument("--probes", help="file for the Records of calibrate's calls")
    parser.add_argument("--drawn", help="file for those of the drawn calls")
    parser.add_argument("--device", help="name of the host in the Records")
    parser.add_argument("--commit", help="of the library")
    asked = parser.parse_args()
    cases = collections.defaultdict(list)
    for path in asked.rounds:
        for line in open(path, encoding="utf-8"):
            run = json.loads(line)
            cases[case_of(run)].append(run)
    for path, drawn in ((asked.probes, False), (asked.drawn, True)):
        if not path:
            continue
        with open(path, "w", encoding="utf-8") as out:
            for runs in cases.values():
                if runs[0]["drawn"] == drawn:
                    out.write(json.dumps(record_of(runs, asked.device, asked.commit)) + "\n")
    say_noise(cases)


if __name__ == "__main__":
    main()
