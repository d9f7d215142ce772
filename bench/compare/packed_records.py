#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes Records of the figures of cuda_packed.py, with the lengths of their documents, for `tessera roofline --accuracy`.

    cd bench/results/h200/waiting && records="python3 ../../../compare/packed_records.py packed_figures.jsonl --date 2026-12-01"
    $records --means 64,1024,8192 > fitted_packed.jsonl
    $records --means 256,4096,32768 > packed.jsonl

The lengths are drawn again from the seed that each figure names. A kernel's time is the FLOP of visible pairs over its rate.
tessera's forward writes the residual of O, as cuda_packed.py asks it to. Its second row of each figure is the batch of equal
documents ("dense"). The model's constants may be fitted to the first file; the other one is kept apart.
"""
import argparse
import json
import random
import sys

from cuda_packed import draw_lengths

KERNELS = {"tessera": ("tessera", "fa3"), "dense": ("tessera", "fa3"), "fa2": ("fa2", "fa2"), "fa3": ("fa3", "fa3")}


def records_of(figure, options):
    lengths = draw_lengths(random.Random(f"{figure['seed']} {figure['mean']}"), figure["distribution"], figure["mean"],
                           figure["tokens"])
    if len(lengths) != figure["documents"]:
        sys.exit(f"seed: expected {figure['documents']} documents, got {len(lengths)}")
    backward = figure["pass"] == "backward"
    equal = max(1, round(sum(n * n for n in lengths) / figure["tokens"]))
    drawn = lengths
    for name, tflops in figure["tflops"].items():
        if name not in KERNELS:
            continue
        lengths = [equal] * max(1, round(figure["tokens"] / equal)) if name == "dense" else drawn
        flop = (10 if backward else 4) * figure["heads_q"] * figure["head_dim"] * sum(n * (n + 1) // 2 for n in lengths)
        by, schedule = KERNELS[name]
        residual = ", residual of O" if by == "tessera" else ""
        yield {"what": "measured", "by": by, "schedule": schedule, "pass": figure["pass"], "dtype": "bf16",
               "batch": len(lengths), "len_q": max(lengths), "len_kv": max(lengths), "heads_q": figure["heads_q"],
               "heads_kv": figure["heads_kv"], "head_dim": figure["head_dim"], "head_dim_v": figure["head_dim"],
               "mask": "causal bottom-right", "deterministic": by == "tessera" or not backward, "ms": flop / tflops * 1e-9,
               "tflops": tflops, "features": "ragged" + residual, "lens_q": lengths, "lens_kv": lengths,
               "device": figure["device"], "clock_mhz": figure["clock_mhz"],
               "versions": {"tessera": figure["tessera"], "torch": figure["torch"]},
               "date": options.date, "commit": figure["commit"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", help="what cuda_packed.py --out wrote")
    parser.add_argument("--date", required=True, help="of the measurement")
    parser.add_argument("--means", help="mean lengths to keep, with commas; all")
    options = parser.parse_args()
    with open(options.figures) as file:
        for line in file:
            figure = json.loads(line)
            if options.means and str(figure["mean"]) not in options.means.split(","):
                continue
            for record in records_of(figure, options):
                print(json.dumps(record))


if __name__ == "__main__":
    main()
