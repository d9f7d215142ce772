#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of features, threads and lengths in tessera's CPU kernels, each beside a plain call in the same run.

    python3 bench/compare/cpu_features.py build/src/libtessera.so [--parts features,scaling] [--out records.jsonl]

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON); nothing else than Python is needed. Four parts:

  features  time for each visible pair of a call with a feature, relative to the plain call (full mask) beside it
  scaling   16 heads of 2,048 on one thread and on all
  lengths   time for each visible pair from 1,024 to 65,536, causal
  memory    workspace for each token, and the growth of the process in a call

Calls are taken in turn; a figure is a median over rounds, a ratio the median of the rounds' ratios. All of it takes about
five minutes on two shared cores, less on more.
"""
import argparse
import itertools
import json
import os
import statistics
import sys

import abi
from abi import BACKWARD, FORWARD
from host import DTYPES, Arena, Bound, Case, commit, elements, in_turn, record

PASSES = {"forward": FORWARD, "backward": BACKWARD}
MIXED = [2048, 1536, 1024, 700, 512, 333, 256, 128, 77, 16, 1]
TARGET = {"dropout": 60}  # percent of the plain speed; others 80
GROWTH = 10  # percent that the time of a pair may differ between lengths


def feature_cases(many):
    """The plain case first. `many`: sizes for many threads."""
    heads, n = (16, 2048) if many else (2, 2048)
    grouped, of = (16, 2048) if many else (8, 1024)
    return [Case("plain", [n], heads), Case("causal", [n], heads, causal=True),
            Case("window 1024 of 8192", [8192], heads, causal=True, window=1023),
            Case("softcap 30", [n], heads, softcap=30.0), Case("ALiBi", [n], heads, alibi=1),
            Case(f"GQA {grouped}/1", [of], grouped, 1), Case(f"GQA {grouped}/{grouped // 2}", [of], grouped, grouped // 2),
            Case("ragged, mixed lengths", MIXED, heads), Case("ragged, causal", MIXED, heads, causal=True),
            Case("dropout 0.1", [n], heads, dropout_probability=0.1, dropout_seed=42)]


class Bench:
    def __init__(self, options):
        self.options = options
        self.lib = abi.Library(options.library)
        self.versions = {"tessera": self.lib.version()}
        self.revision = options.commit or commit()
        self.out = open(options.out, "a") if options.out else None
        self.dims = [int(d) for d in options.head_dim.split(",")]
        self.dtypes = options.dtype.split(",")

    def bind(self, cases, dtype, dim, threads):
        """Cases in memory, with O and LSE computed."""
        arena = Arena(DTYPES[dtype], max(elements(case, dim) for case in cases))
        bound = [Bound(self.lib, case, DTYPES[dtype], dim, t, arena) for case, t in zip(cases, threads)]
        for case, b in zip(cases, bound):
            b.call(FORWARD)()
            if not b.looks_right():
                sys.exit(f"wrong result: {case.name}, {dtype}, head_dim {dim}")
        return bound

    def write(self, case, direction, dtype, dim, threads, times):
        if self.out:
            row = record(case, direction, dtype, dim, threads, times, self.versions, self.revision)
            self.out.write(json.dumps(row) + "\n")
            self.out.flush()

    # ---- features

    def features(self):
        for threads in dict.fromkeys((1, self.options.threads)):
            cases = feature_cases(threads > 1)
            for dtype in self.dtypes:
                columns = [(dim, name) for dim in self.dims for name in PASSES]
                table = [self.feature_column(cases, dtype, dim, PASSES[name], threads) for dim, name in columns]
                print(f"\n{dtype}, {threads} thread{'s' * (threads > 1)}: speed of a visible pair, percent of plain"
                      "  (* under the target)")
                print(f"{'':22}" + "".join(f"{f'{dim} {name}':>15}" for dim, name in columns))
                print(f"{'plain, ns / 1000 pairs':22}" + "".join(f"{c[0]:15.1f}" for c in table))
                for i, case in enumerate(cases[1:], 1):
                    target = TARGET.get(case.name.split()[0], 80)
                    print(f"{case.name:22}" + "".join(
                        f"{c[i]:14.0f}{'*' if c[i] < target else ' '}" for c in table), flush=True)

    def feature_column(self, cases, dtype, dim, direction, threads):
        """ns for 1000 plain pairs, then each case's speed in percent of it."""
        calls = [b.call(direction) for b in self.bind(cases, dtype, dim, [threads] * len(cases))]
        # A plain call beside every other: a disturbance of the machine affects both.
        order = [calls[0] if i % 2 == 0 else calls[1 + i // 2] for i in range(2 * len(calls) - 2)]
        times = in_turn(order, self.options.seconds * len(cases), least=3)
        plain_pairs = cases[0].visible_pairs()
        column = [statistics.median(times[0]) * 1e9 / plain_pairs]
        self.write(cases[0], direction, dtype, dim, threads, times[0])
        for i, case in enumerate(cases[1:]):
            self.write(case, direction, dtype, dim, threads, times[2 * i + 1])
            ratios = [plain / plain_pairs / (mine / case.visible_pairs())
                      for plain, mine in zip(times[2 * i], times[2 * i + 1])]
            column.append(100 * statistics.median(ratios))
        return column

    # ---- scaling

    def scaling(self):
        many = self.options.threads
        print(f"\n16 heads of 2,048: ms on 1 and on {many} threads, and how many times faster"
              f"  (target {13 * many / 16:.1f})")
        print(f"{'':12}{'head_dim':>9}{'mask':>8}" + "".join(f"{name:>30}" for name in PASSES))
        for dtype, dim, causal in itertools.product(self.dtypes, self.dims, (False, True)):
            case = Case("scaling", [2048], 16, causal=causal)
            bound = self.bind([case, case], dtype, dim, [1, many])
            line = f"{dtype:12}{dim:9}{'causal' if causal else 'full':>8}"
            for direction in PASSES.values():
                times = in_turn([b.call(direction) for b in bound], self.options.seconds, least=3)
                for threads, t in zip((1, many), times):
                    self.write(case, direction, dtype, dim, threads, t)
                one, all_of_them = map(statistics.median, times)
                line += f"{one:12.2f}{all_of_them:10.2f}{one / all_of_them:8.2f}"
            print(line, flush=True)

    # ---- lengths

    def lengths(self):
        threads, dim = self.options.threads, self.dims[0]
        for heads, longest in ((1, 65536), (16, 16384)):
            longest = min(longest, self.options.longest)
            lens = [1024 << i for i in range(7) if 1024 << i <= longest]
            print(f"\ncausal, {heads} head{'s' * (heads > 1)}, head_dim {dim}, {threads} threads: ns / 1000 visible "
                  f"pairs, percent off the median\n{'':14}" + "".join(f"{n:>12}" for n in lens))
            for dtype, (name, direction) in itertools.product(self.dtypes, PASSES.items()):
                cases = [Case("length", [n], heads, causal=True) for n in lens]
                bound = self.bind(cases, dtype, dim, [threads] * len(cases))
                times = in_turn([b.call(direction) for b in bound], self.options.seconds * 3, least=3)
                for case, t in zip(cases, times):
                    self.write(case, direction, dtype, dim, threads, t)
                cost = [statistics.median(t) * 1e9 / case.visible_pairs() for t, case in zip(times, cases)]
                off = [100 * (x / statistics.median(cost) - 1) for x in cost]
                print(f"{dtype + ' ' + name:14}" + "".join(
                    f"{x:7.1f}{o:+4.0f}{'*' if abs(o) > GROWTH else ' '}" for x, o in zip(cost, off)), flush=True)

    # ---- memory

    def memory(self):
        threads, dim = self.options.threads, self.dims[0]
        lens = [n for n in (1024, 4096, 16384, 65536) if n <= self.options.longest]
        print(f"\ncausal, 1 head, head_dim {dim}, {threads} threads: bytes of workspace for each token, and MiB that "
              f"the process\ngrows by in a call of the longest beyond its tensors\n{'':14}" +
              "".join(f"{n:>12}" for n in lens) + f"{'workspace':>14}{'growth':>10}")
        for dtype, (name, direction) in itertools.product(self.dtypes, PASSES.items()):
            sizes = []
            for n in lens:
                problem = self.lib.problem(Case("memory", [n], 1, causal=True).problem(DTYPES[dtype], dim))
                how = abi.Options(struct_size=abi.c.sizeof(abi.Options), threads=threads)
                sizes.append(self.lib.workspace_bytes(problem, how, direction))
            bound, = self.bind([Case("memory", lens[-1:], 1, causal=True)], dtype, dim, [threads])
            grown = growth(bound.call(direction))
            print(f"{dtype + ' ' + name:14}" + "".join(f"{size / n:12.0f}" for size, n in zip(sizes, lens)) +
                  f"{sizes[-1] / 2**20:10.1f} MiB{grown / 2**20:6.1f} MiB", flush=True)


def status_bytes(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def growth(call):
    """The growth of resident memory in a call: its peak less the value at the start."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the peak
    except OSError:
        pass
    before = status_bytes("VmRSS")
    call()
    return max(0, status_bytes("VmHWM") - before)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--parts", default="features,scaling,lengths,memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="the many")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--longest", type=int, default=65536, help="of lengths and memory")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--quick", action="store_true", help="head_dim 64, up to 8,192, few rounds")
    parser.add_argument("--out", help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", help="of the library, when it runs outside its checkout")
    options = parser.parse_args()
    if options.quick:
        options.head_dim, options.longest, options.seconds = "64", min(options.longest, 8192), 0.0
    bench = Bench(options)
    for part in options.parts.split(","):
        getattr(bench, part)()


if __name__ == "__main__":
    main()
