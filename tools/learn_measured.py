#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Repeats what pages say about Records.

win: forward calls of 16 heads of 128, in ms, by length and mask: standard (tessera's kernel) and fa2 and fa3
(flash-attention's) on an H200, fa2 and fa3 on an H100. schedules and peers: the measurements of docs/learn/faq.md, which are forward, bf16, 4 x 4096, 16 heads of 128, no mask,
on an H200. held_out: the errors of docs/model.md on the rows of an H200 that are held out and not blind, from the JSON
of `tessera roofline --accuracy --json` on standard input.

Usage: learn_measured.py win | schedules | peers | held_out
"""
import json
import pathlib
import statistics
import sys

RESULTS = pathlib.Path(__file__).parent.parent / "bench/results"
RECORDS = RESULTS / "h200"
CASE = {"pass": "forward", "batch": 4, "len_q": 4096, "heads_q": 16, "heads_kv": 16, "head_dim": 128, "mask": "none"}
FLOP = 4 * 4 * 16 * 4096**2 * 128


def rows(name):
    with open(RECORDS / f"{name}.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if all(record.get(key) == value for key, value in CASE.items()):
                yield record


def schedules():
    """Measures tessera's kernels: bytes of DRAM by Nsight Compute, times by a run without it."""
    times = {record["schedule"]: record["ms"] for record in rows("forward") if record["by"] == "tessera"}
    print("schedule      DRAM      time     TB/s  TFLOP/s")
    for record in rows("bytes"):
        name, gigabytes = record["schedule"], record["bytes"]["dram"] / 1e9
        ms = times[name]
        print(f"{name:9} {gigabytes:6.2f} GB  {ms:.3f} ms  {gigabytes / ms:4.2f}     {FLOP / ms / 1e9:4.0f}")


def peers():
    """Measures flash-attention's and cuDNN's kernels in one session."""
    for record in rows("peers"):
        print(f"{record['by']:6} {record['ms']:.3f} ms  {FLOP / record['ms'] / 1e9:4.0f} TFLOP/s")


def win():
    """Prints the win of fa3 over standard on an H200, and what an H100 takes, on which standard was not measured."""
    sources = {"h200/forward": ("tessera standard",), "h200/peers": ("fa2 fa2", "fa3 fa3"),
               "h100/forward_beside_fa3": ("fa2 fa2", "fa3 fa3")}
    times = {}
    for name, kernels in sources.items():
        for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            kernel = f"{record['by']} {record['schedule']}"
            if record["pass"] == "forward" and record["heads_q"] == 16 and record["head_dim"] == 128 and kernel in kernels:
                case = (record["mask"], record["len_q"], record["batch"])
                times.setdefault(case, {})[f"{name[:4]} {record['schedule']}"] = record["ms"]
    print("mask       texts      H200: standard     fa2     fa3   win   H100: fa2     fa3")
    for (mask, length, batch), ms in sorted(times.items()):
        standard, fa2, fa3 = (ms[f"h200 {name}"] for name in ("standard", "fa2", "fa3"))
        print(f"{mask:8} {batch:2} x {length:5}  {standard:14.3f}  {fa2:6.3f}  {fa3:6.3f}  {standard / fa3:4.1f}"
              f"      {ms['h100 fa2']:6.3f}  {ms['h100 fa3']:6.3f}")


def held_out():
    """Prints the number of rows, the median and mean error, and the share of rows that are off by 15 % at most."""
    kept = [row for row in json.load(sys.stdin)["rows"]
            if row["device"] == "NVIDIA H200" and row["held_out"] and not row["blind"]
            and "source" not in row["versions"] and row["by"] not in ("math", "memory-efficient")]  # of others, PyTorch
    groups = {
        "all": lambda row: True,
        "without standard and fa1": lambda row: row["schedule"] not in ("standard", "fa1"),
        "standard": lambda row: row["schedule"] == "standard",
        "standard, decode": lambda row: row["schedule"] == "standard" and row["kind"] == "decode",
    }
    for name, belongs in groups.items():
        errors = [abs(row["error"]) for row in kept if belongs(row)]
        within = sum(error <= 0.15 for error in errors) / len(errors)
        print(f"{name}: {len(errors):,} rows, {100 * statistics.median(errors):.1f} % in the median, "
              f"{100 * statistics.mean(errors):.1f} % in the mean, {100 * within:.0f} % by 15 % at most")


if __name__ == "__main__":
    COMMANDS = {"win": win, "schedules": schedules, "peers": peers, "held_out": held_out}
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    COMMANDS[sys.argv[1]]()
