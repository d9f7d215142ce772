#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times tessera beside PyTorch's CPU attention in one process, call by call in turn, and prints the ratios.

    python3 bench/compare/torch_cpu.py build/src/libtessera.so [--dtype fp32,bf16] [--out records.jsonl]

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON) and called through its C ABI. A figure is the median
of alternating calls; FLOP count visible pairs: 4 * pairs * head_dim forward, 10 * pairs * head_dim backward.
Results up to length 2048 are first compared with PyTorch's fp32 ones, so that a fast wrong answer can't be reported.
The whole grid takes three to four minutes on 16 cores.
"""
import argparse
import ctypes
import datetime
import itertools
import json
import math
import statistics
import sys

import torch

import abi
from abi import BACKWARD, FORWARD
from host import alternate, commit, cpu_name

LONGEST_CHECKED = 2048
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_case_calls(lib, case):
    """({pass: ours}, {pass: torch's}, worst relative difference of our results)."""
    dtype = DTYPES[case["dtype"]]
    size = {"dtype": abi.DTYPES[dtype], "batch": 1, "len_q": case["len"], "len_kv": case["len"],
            "heads_q": case["heads"], "heads_kv": case["heads"], "head_dim": case["head_dim"],
            "head_dim_v": case["head_dim"], "causal": int(case["causal"])}
    how = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=case["threads"])
    shape = (1, case["heads"], case["len"], case["head_dim"])
    q, k, v, d_o = (torch.randn(shape, dtype=torch.float32).to(dtype) for _ in range(4))
    o, dq, dk, dv = (torch.full(shape, math.nan, dtype=dtype) for _ in range(4))
    lse = torch.full(shape[:3], math.nan)
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    ours = {FORWARD: lib.prepare(size, how, FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse)),
            BACKWARD: lib.prepare(size, how, BACKWARD, dict(q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv))}
    out, torch_lse = flash(q, k, v, 0.0, case["causal"])
    peers = {FORWARD: lambda: flash(q, k, v, 0.0, case["causal"]),
             BACKWARD: lambda: flash_backward(d_o, q, k, v, out, torch_lse, 0.0, case["causal"])}
    ours[FORWARD]()
    ours[BACKWARD]()
    if case["len"] > LONGEST_CHECKED:
        return ours, peers, 0.0, 0.0
    exact_o, exact_lse = flash(q.float(), k.float(), v.float(), 0.0, case["causal"])
    exact = (exact_o,) + tuple(flash_backward(d_o.float(), q.float(), k.float(), v.float(), exact_o, exact_lse, 0.0, case["causal"]))
    mine = (o, dq, dk, dv)
    worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(mine, exact))
    theirs = (out,) + tuple(peers[BACKWARD]())
    theirs_worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(theirs, exact))
    return ours, peers, worst, theirs_worst


def visible_pairs(case):
    n = case["len"]
    return case["heads"] * (n * (n + 1) // 2 if case["causal"] else n * n)


def record(case, direction, by, ms, spread, versions, revision):
    flop = (4 if direction == FORWARD else 10) * visible_pairs(case) * case["head_dim"]
    return {"what": "measured", "by": by, "schedule": "fa2" if by == "tessera" else "", "pass": ("forward", "backward")[direction],
            "dtype": case["dtype"], "batch": 1, "len_q": case["len"], "len_kv": case["len"], "heads_q": case["heads"],
            "heads_kv": case["heads"], "head_dim": case["head_dim"], "head_dim_v": case["head_dim"],
            "mask": "causal" if case["causal"] else "none", "deterministic": True, "ms": ms, "ms_spread": spread,
            "tflops": flop / ms * 1e-9, "device": cpu_name(), "threads": case["threads"], "versions": versions,
            "date": datetime.date.today().isoformat(), "commit": revision}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--len", default="128,512,2048,8192", help="8192 on one thread is left out")
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--groups", default="1x4,16x16,16x1", help="threads x heads")
    parser.add_argument("--seconds", type=float, default=0.2, help="per case and pass")
    parser.add_argument("--out", help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", help="of the library, when it runs outside its checkout")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    versions = {"tessera": lib.version(), "torch": torch.__version__}
    revision = options.commit or commit()
    out = open(options.out, "a") if options.out else None
    ratios = {}
    print(f"{'threads':>7} {'heads':>5} {'dtype':>5} {'dim':>4} {'mask':>6} {'len':>5} {'pass':>8} {'tessera':>9} {'torch':>9} {'ratio':>6}  error ours / torch")
    for group, dtype, dim, causal, length in itertools.product(options.groups.split(","), options.dtype.split(","),
                                                               map(int, options.head_dim.split(",")), (False, True),
                                                               map(int, options.len.split(","))):
        threads, heads = map(int, group.split("x"))
        if threads == 1 and length > 2048:
            continue
        case = {"threads": threads, "heads": heads, "dtype": dtype, "head_dim": dim, "causal": causal, "len": length}
        torch.set_num_threads(threads)
        ours, peers, error, torch_error = make_case_calls(lib, case)
        if not error < (1e-4 if dtype == "fp32" else 3e-2):
            sys.exit(f"wrong result: {case}: relative error {error}")
        for direction in (FORWARD, BACKWARD):
            quarters = [statistics.quantiles(t, n=4) for t in alternate([ours[direction], peers[direction]], options.seconds)]
            (ms, spread), (torch_ms, torch_spread) = [(q[1], q[2] - q[0]) for q in quarters]
            rows = [record(case, direction, "tessera", ms, spread, versions, revision),
                    record(case, direction, "torch_cpu", torch_ms, torch_spread, versions, revision)]
            if out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
            ratio = torch_ms / ms
            ratios.setdefault((group, dtype, rows[0]["pass"]), []).append(ratio)
            print(f"{threads:7} {heads:5} {dtype:>5} {dim:4} {rows[0]['mask']:>6} {length:5} {rows[0]['pass']:>8} "
                  f"{rows[0]['tflops'] * 1e3:7.0f} G {rows[1]['tflops'] * 1e3:7.0f} G {ratio:6.2f}  {error:.1e} / {torch_error:.1e}", flush=True)
    print("\nPyTorch time / ours:      geometric mean   worst")
    for (group, dtype, direction), values in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(f"  {group:>6} {dtype:>5} {direction:>8} {mean:16.2f} {min(values):7.2f}")


if __name__ == "__main__":
    main()
