#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decoding from a cache of keys on the CPU: pages of several sizes beside one slot for each sequence.

    python3 bench/compare/cpu_cache.py build/src/libtessera.so [--pages 16,128,256] [--threads 1]

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON) and called through its C ABI. All calls have the same
queries and keys, and their outputs must have equal bits. The pages lie in random order. `vs slots` is the median of the
ratios of neighbouring blocks of calls: over 1 is slower than slots. On one thread the times are CPU times.
"""
import argparse
import ctypes
import statistics
import sys
import time

import torch

import abi
from cpu_decode import DTYPES, ratio
from host import alternate


def calls_of(lib, dtype, options):
    """([name, ..], [call, ..], bytes of K and V); the first is that of slots."""
    heads, heads_kv, keys, dim, batch = options.heads, options.heads_kv, options.len_kv, options.head_dim, options.batch
    q = torch.randn(batch, 1, heads, dim).to(DTYPES[dtype])
    k, v = (torch.randn(batch, keys, heads_kv, dim).to(DTYPES[dtype]) for _ in range(2))
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    how = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=options.threads)
    names, calls, outputs = [], [], []
    for page in (0, *map(int, options.pages.split(","))):
        width = -(-keys // page) if page else 0
        shape = {"dtype": abi.DTYPES[q.dtype], "batch": batch, "len_q": 1, "len_kv": width * page or keys, "heads_q": heads,
                 "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "kv_lengths": 1, "page_size": page, "causal": 1}
        tensors = {"q": q, "k": k, "v": v, "o": torch.empty_like(q), "kv_lengths": lengths}
        if page:
            table = torch.randperm(batch * width).view(batch, width)
            tensors["page_table"] = table.to(torch.int32)
            for name, rows in (("k", k), ("v", v)):
                padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, width * page - keys))
                tensors[name] = torch.empty(batch * width, page, heads_kv, dim, dtype=q.dtype)
                tensors[name][table.flatten()] = padded.reshape(-1, page, heads_kv, dim)
        problem = lib.problem(shape)
        size = lib.workspace_bytes(problem, how, abi.FORWARD)
        memory = torch.empty(size + 64, dtype=torch.uint8)
        views = {name: abi.view(t.transpose(1, 2) if t.dim() == 4 else t) for name, t in tensors.items()}
        calls.append(lib.bind(problem, how, abi.FORWARD, views, (memory.data_ptr() + 63) // 64 * 64, size, None,
                              (memory, tensors)))
        calls[-1]()
        names.append(f"pages of {page}" if page else "slots")
        outputs.append(tensors["o"])
        if not torch.equal(outputs[0], outputs[-1]):
            sys.exit(f"{names[-1]}: other bits than slots")
    return names, calls, 2 * k.numel() * k.element_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--pages", default="16,128,256", help="page sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--len-kv", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10, help="per dtype")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(f"{options.batch} sequences, {options.heads} heads on {options.heads_kv}, {options.len_kv} keys, head_dim "
          f"{options.head_dim}, {options.threads} threads; medians")
    for dtype in options.dtype.split(","):
        names, calls, size = calls_of(lib, dtype, options)
        times = alternate(calls, options.seconds, clock)
        for name, taken in zip(names, times):
            print(f"{dtype:>5} {name:>14} {statistics.median(taken):8.2f} ms {size / statistics.median(taken) * 1e-6:6.1f} "
                  f"GB/s {ratio(taken, times[0]):6.2f} vs slots", flush=True)


if __name__ == "__main__":
    main()
