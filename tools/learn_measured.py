#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Repeats the measurements of docs/learn/faq.md: forward, bf16, 4 x 4096, 16 heads of 128, no mask, on an H200.

Usage: learn_measured.py schedules | peers
"""
import json
import pathlib
import sys

RECORDS = pathlib.Path(__file__).parent.parent / "bench/results/h200"
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


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("schedules", "peers"):
        sys.exit(__doc__)
    {"schedules": schedules, "peers": peers}[sys.argv[1]]()
