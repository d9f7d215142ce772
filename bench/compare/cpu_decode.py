#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decoding on the CPU: a few queries per head on many keys, beside PyTorch and beside plain reading.

    python3 bench/compare/cpu_decode.py build/src/libtessera.so [--threads 16] [--out records.jsonl]

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON) and called through its C ABI. Decoding reads K and V
once, so figures are in GB/s of K and V. `read` is the sum of as many numbers by PyTorch, in turn with the others: the
read rate of the machine at that moment, almost without arithmetic. Keys of batch 1 may stay in the last-level cache from
call to call; those of the larger batch exceed it.
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
from abi import FORWARD
from host import alternate, commit, cpu_name

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHES = 640 << 20  # bytes of K and V: more than any last-level cache


def calls_of(lib, dtype, batch, options):
    """{name: call} and the bytes of K and V; checks our result against PyTorch's in fp32."""
    group, heads_kv, keys, dim = options.group, options.heads_kv, options.len_kv, options.head_dim
    heads, queries = group * heads_kv, options.len_q
    q = torch.randn(batch, heads, queries, dim).to(DTYPES[dtype])
    k, v = (torch.randn(1, heads_kv, keys, dim).to(DTYPES[dtype]).repeat(batch, 1, 1, 1) for _ in range(2))
    o = torch.full_like(q, math.nan)
    lse = torch.full((batch, heads, queries), math.nan)
    size = {"dtype": abi.DTYPES[q.dtype], "batch": batch, "len_q": queries, "len_kv": keys, "heads_q": heads,
            "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim}
    how = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=options.threads)
    ours = lib.prepare(size, how, FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))
    ours()
    attention = torch.nn.functional.scaled_dot_product_attention
    exact = attention(q[:1].float(), k[:1].float(), v[:1].float(), enable_gqa=True)
    error = float((o[:1].float() - exact).norm() / exact.norm())
    if not error < (1e-5 if dtype == "fp32" else 1e-2):
        sys.exit(f"wrong result: {dtype}, batch {batch}: relative error {error}")
    numbers = [x.view(torch.float32) for x in (k, v)]
    return {"tessera": ours, "torch_cpu": lambda: attention(q, k, v, enable_gqa=True),
            "read": lambda: [x.sum() for x in numbers]}, 2 * k.numel() * k.element_size()


def record(name, dtype, batch, options, times, size, versions, revision):
    quarters = statistics.quantiles(times, n=4)
    heads = options.group * options.heads_kv
    return {"what": "measured", "by": name, "schedule": "fa2" if name == "tessera" else "", "pass": "forward",
            "dtype": dtype, "batch": batch, "len_q": options.len_q, "len_kv": options.len_kv, "heads_q": heads,
            "heads_kv": options.heads_kv, "head_dim": options.head_dim, "head_dim_v": options.head_dim, "mask": "none",
            "deterministic": True, "ms": quarters[1], "ms_spread": quarters[2] - quarters[0],
            "tflops": 4e-9 * batch * heads * options.len_q * options.len_kv * options.head_dim / quarters[1], "bytes": {"dram": size},
            "device": cpu_name(), "threads": options.threads, "versions": versions,
            "date": datetime.date.today().isoformat(), "commit": revision}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads-kv", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="query heads on one of keys")
    parser.add_argument("--len-q", type=int, default=1, help="queries per head")
    parser.add_argument("--len-kv", type=int, default=32768)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3, help="per row")
    parser.add_argument("--out", help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", help="of the library, when it runs outside its checkout")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    torch.set_num_threads(options.threads)
    versions = {"tessera": lib.version(), "torch": torch.__version__}
    revision = options.commit or commit()
    print(f"{options.len_q} queries, {options.group * options.heads_kv} heads on {options.heads_kv}, {options.len_kv} keys, head_dim "
          f"{options.head_dim}, {options.threads} threads; GB/s of K and V, medians")
    print(f"{'dtype':>5} {'batch':>5} {'MiB':>6} {'tessera':>8} {'torch':>8} {'read':>8} {'% of read':>10}")
    for dtype, large in itertools.product(options.dtype.split(","), (False, True)):
        one = 2 * options.heads_kv * options.len_kv * options.head_dim * DTYPES[dtype].itemsize
        batch = -(-CACHES // one) if large else 1
        calls, size = calls_of(lib, dtype, batch, options)
        times = dict(zip(calls, alternate(list(calls.values()), options.seconds)))
        rate = {name: size / statistics.median(t) * 1e-6 for name, t in times.items()}
        print(f"{dtype:>5} {batch:5} {size >> 20:6} {rate['tessera']:8.0f} {rate['torch_cpu']:8.0f} {rate['read']:8.0f} "
              f"{100 * rate['tessera'] / rate['read']:9.0f}%", flush=True)
        if options.out:
            with open(options.out, "a") as out:
                for name in ("tessera", "torch_cpu"):
                    row = record(name, dtype, batch, options, times[name], size, versions, revision)
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
