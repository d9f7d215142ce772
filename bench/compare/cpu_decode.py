#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decoding on the CPU: a few queries per head on many keys, beside PyTorch and beside plain reading.

    python3 bench/compare/cpu_decode.py build/src/libtessera.so [--threads 16] [--out records.jsonl]
    python3 bench/compare/cpu_decode.py build/src/libtessera.so --threads 1 --pass backward

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON) and called through its C ABI. Decoding reads K and V
once, so figures are in GB/s of K and V. `read` is the sum of as many numbers by PyTorch, in turn with the others: the
read rate of the machine at that moment, almost without arithmetic. Keys of batch 1 may stay in the last-level cache from
call to call; those of the larger batch exceed it. `vs torch` is the median of the ratios of neighbouring blocks of calls.

With --pass backward PyTorch runs torch.autograd.grad. glibc should keep freed memory, or PyTorch's calls fault in pages for
their gradients: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000. On one thread the times are CPU times.
"""
import argparse
import ctypes
import datetime
import itertools
import json
import math
import statistics
import sys
import time

import torch

import abi
from abi import BACKWARD, FORWARD
from host import BLOCK, alternate, commit, cpu_name

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHES = 640 << 20  # bytes of K and V: more than any last-level cache


def calls_of(lib, dtype, batch, options):
    """{name: call} and the bytes of K and V; checks our result against PyTorch's in fp32."""
    group, heads_kv, keys, dim = options.group, options.heads_kv, options.len_kv, options.head_dim
    heads, queries = group * heads_kv, options.len_q
    q = torch.randn(batch, heads, queries, dim).to(DTYPES[dtype])
    k, v = (torch.randn(1, heads_kv, keys, dim).to(DTYPES[dtype]).repeat(batch, 1, 1, 1) for _ in range(2))
    size = {"dtype": abi.DTYPES[q.dtype], "batch": batch, "len_q": queries, "len_kv": keys, "heads_q": heads,
            "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim}
    how = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=options.threads)
    run = backward_calls if options.direction == "backward" else forward_calls
    numbers = [x.view(torch.float32) for x in (k, v)]
    return {**run(lib, size, how, q, k, v), "read": lambda: [x.sum() for x in numbers]}, 2 * k.numel() * k.element_size()


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def check(name, got, exact, dtype):
    error = float((got.float() - exact).norm() / exact.norm())
    if not error < (1e-5 if dtype == torch.float32 else 1e-2):
        sys.exit(f"wrong {name}: {dtype}, batch {got.shape[0]}: relative error {error}")


def forward_calls(lib, size, how, q, k, v):
    o = torch.full_like(q, math.nan)
    ours = lib.prepare(size, how, FORWARD, dict(q=q, k=k, v=v, o=o, lse=torch.empty(q.shape[:3])))
    ours()
    check("o", o[:1], attention(q[:1].float(), k[:1].float(), v[:1].float()), q.dtype)
    return {"tessera": ours, "torch_cpu": lambda: attention(q, k, v)}


def backward_calls(lib, size, how, q, k, v):
    o, lse, d_o = torch.empty_like(q), torch.empty(q.shape[:3]), torch.randn_like(q)
    lib.prepare(size, how, FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))()
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    ours = lib.prepare(size, how, BACKWARD, dict(q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv))
    ours()
    exact = [x[:1].float().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attention(*exact), exact, d_o[:1].float())
    for name, got, right in zip(("dq", "dk", "dv"), (dq, dk, dv), gradients):
        check(name, got[:1], right, q.dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return {"tessera": ours, "torch_cpu": lambda: torch.autograd.grad(out, leaves, d_o, retain_graph=True)}


def record(name, dtype, batch, options, times, size, versions, revision):
    quarters = statistics.quantiles(times, n=4)
    flop = 4e-9 if options.direction == "forward" else 1e-8
    heads = options.group * options.heads_kv
    return {"what": "measured", "by": name, "schedule": "fa2" if name == "tessera" else "", "pass": options.direction,
            "dtype": dtype, "batch": batch, "len_q": options.len_q, "len_kv": options.len_kv, "heads_q": heads,
            "heads_kv": options.heads_kv, "head_dim": options.head_dim, "head_dim_v": options.head_dim, "mask": "none",
            "deterministic": True, "ms": quarters[1], "ms_spread": quarters[2] - quarters[0],
            "tflops": flop * batch * heads * options.len_q * options.len_kv * options.head_dim / quarters[1], "bytes": {"dram": size},
            "device": cpu_name(), "threads": options.threads, "versions": versions,
            "date": datetime.date.today().isoformat(), "commit": revision}


def ratio(theirs, ours):
    """The median over the blocks of calls that alternate() made. Blocks of long calls are single calls."""
    if len(theirs) != len(ours):
        return statistics.median(theirs) / statistics.median(ours)
    blocks = [(theirs[i:i + BLOCK], ours[i:i + BLOCK]) for i in range(0, min(len(theirs), len(ours)), BLOCK)]
    return statistics.median(statistics.median(t) / statistics.median(o) for t, o in blocks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--batch", default="1,large", help="1, large (more than any cache holds) or both")
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
    print(f"{'dtype':>5} {'batch':>5} {'MiB':>6} {'tessera':>8} {'torch':>8} {'read':>8} {'% of read':>10} {'vs torch':>9}")
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for dtype, large in itertools.product(options.dtype.split(","), [x == "large" for x in options.batch.split(",")]):
        one = 2 * options.heads_kv * options.len_kv * options.head_dim * DTYPES[dtype].itemsize
        batch = -(-CACHES // one) if large else 1
        calls, size = calls_of(lib, dtype, batch, options)
        times = dict(zip(calls, alternate(list(calls.values()), options.seconds, clock)))
        rate = {name: size / statistics.median(t) * 1e-6 for name, t in times.items()}
        print(f"{dtype:>5} {batch:5} {size >> 20:6} {rate['tessera']:8.0f} {rate['torch_cpu']:8.0f} {rate['read']:8.0f} "
              f"{100 * rate['tessera'] / rate['read']:9.0f}% {ratio(times['torch_cpu'], times['tessera']):9.2f}", flush=True)
        if options.out:
            with open(options.out, "a") as out:
                for name in ("tessera", "torch_cpu"):
                    row = record(name, dtype, batch, options, times[name], size, versions, revision)
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
