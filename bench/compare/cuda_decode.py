#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times few queries on many keys on a GPU, tessera's kernels beside FlashAttention-3 and PyTorch's FlashAttention-2 and
cuDNN.

    python3 bench/compare/cuda_decode.py build/src/libtessera.so [--kernels cuda.decode.forward,cuda.fa3.forward] [--fa3]
        [--set short|all] [--repeat 21] [--dtype bf16] [--before other/libtessera.so] [--out records.jsonl] [--commit HASH]

Each call is one layer's attention: K and V are read from memory, since 256 MiB are written before each call. A figure is
the median over calls in random order, between CUDA events, in microseconds, with the share of the read probe of the same
run (the sum of 4 GiB of floats) that the bytes of K and V of live keys stand for. "page N" is a cache in pages of N
tokens in random order; "slots" is a contiguous cache with lengths on the device. Peers have the same keys without a
cache. Before timing, O is compared with fp32 to 5e-3 of its norm, and LSE to 1e-3. --before times another build too.
"""
import argparse
import ctypes
import datetime
import json
import math
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
import torch_cuda

SHORT = [  # heads_q, heads_kv, head_dim, batch, len, page (0: no cache, -1: slots), queries
    (32, 8, 128, 1, 1024, 0, 1), (32, 8, 128, 1, 4096, 0, 1), (32, 8, 128, 1, 32768, 0, 1), (8, 1, 128, 1, 131072, 0, 1),
    (32, 8, 128, 16, 2048, 0, 1), (32, 8, 128, 32, 4096, 0, 1), (32, 8, 128, 32, 4096, -1, 1), (32, 8, 128, 32, 4096, 256, 1),
    (32, 8, 128, 32, 4096, 16, 1), (32, 8, 128, 32, 4096, 1, 1), (64, 8, 128, 1, 32768, 0, 1), (64, 8, 128, 1, 32768, 0, 4),
    (64, 8, 128, 1, 32768, 0, 8), (16, 16, 64, 16, 4096, 0, 1), (16, 8, 256, 16, 4096, 0, 1)]
ALL = SHORT + [
    (32, 8, 128, 1, 131072, 0, 1), (32, 8, 128, 64, 2048, 0, 1), (32, 8, 128, 64, 2048, 16, 1), (32, 8, 128, 16, 16384, 0, 1),
    (32, 8, 128, 16, 16384, 16, 1), (32, 8, 128, 16, 16384, 64, 1), (32, 8, 128, 32, 4096, 8, 1), (32, 8, 128, 32, 4704, 784, 1),
    (32, 8, 128, 32, 4704, 0, 1), (32, 8, 128, 64, "zipf", -1, 1), (32, 8, 128, 64, "zipf", 16, 1), (64, 8, 128, 32, 4096, 0, 1),
    (64, 8, 128, 1, 32768, 16, 8), (16, 16, 64, 1, 8192, 0, 1), (32, 32, 128, 8, 4096, 0, 1), (32, 4, 80, 16, 4096, 0, 1),
    (28, 4, 128, 16, 4096, 0, 1), (48, 4, 96, 16, 4096, 0, 1), (40, 8, 192, 8, 4096, 0, 1), (64, 1, 128, 32, 4096, 0, 1)]


def probe():
    data = torch.empty(1 << 30, device="cuda").fill_(1)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return data.numel() * 4 / statistics.median(times) * 1e-6  # GB/s


def lengths_of(batch, length):
    """Zipf: the sequence of rank r has 65,536 / r keys, at least 64, in a fixed random order."""
    if length != "zipf": return [length] * batch
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(1)).tolist()
    return [max(65536 // (rank + 1), 64) for rank in order]


def gold(q, k, v, lengths):
    group = q.shape[1] // k.shape[1]
    o, lse = torch.empty_like(q, dtype=torch.float32), torch.empty(q.shape[:3], device=q.device)
    for b, length in enumerate(lengths):
        kb, vb = k[b, :, None, :length].float(), v[b, :, None, :length].float()
        s = q[b].float().unflatten(0, (-1, group)) @ kb.transpose(-1, -2) / math.sqrt(q.shape[-1])
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(length, device=q.device)[None]
        s = s.masked_fill(j > i + length - q.shape[2], -math.inf)
        lse[b] = torch.logsumexp(s, -1).flatten(0, 1)
        o[b] = (torch.softmax(s, -1) @ vb).flatten(0, 1)
    return o, lse


def in_pages(t, page, order, lengths):
    """[batch, heads, len, dim] as pages [pages, heads, page, dim], page number i of a sequence at order[sequence, i]."""
    batch, heads, length, dim = t.shape
    pages = torch.full((order.numel(), page, heads, dim), math.nan, device=t.device, dtype=t.dtype)
    for b in range(batch):
        count = lengths[b] // page * page
        pages[order[b, :count // page].long()] = t[b, :, :count].transpose(0, 1).reshape(-1, page, heads, dim)
        if count < lengths[b]:
            pages[order[b, count // page].long(), :lengths[b] - count] = t[b, :, count:lengths[b]].transpose(0, 1)
    return pages.transpose(1, 2)


def our_tensors(row, q, k, v, lengths):
    """The Problem and the tensors of a row; the peers' K and V are contiguous."""
    heads_q, heads_kv, dim, batch, _, page, queries = row
    capacity = k.shape[2] if page <= 0 else (k.shape[2] + page - 1) // page * page
    shape = {"dtype": abi.DTYPES[q.dtype], "batch": batch, "len_q": queries, "len_kv": capacity, "heads_q": heads_q,
             "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "causal": 1 if queries > 1 else 0}
    tensors = dict(q=q, k=k, v=v)
    if page != 0:
        shape["kv_lengths"] = 1
        tensors["kv_lengths"] = torch.tensor(lengths, device=q.device, dtype=torch.int32)
    if page > 0:
        shape["page_size"] = page
        count = capacity // page
        order = torch.randperm(batch * count, device=q.device).int().view(batch, count)
        tensors |= dict(k=in_pages(k, page, order, lengths), v=in_pages(v, page, order, lengths), page_table=order)
    return shape, tensors


def as_problem(row, name, lengths):
    """The fields of a Record that `tessera roofline --accuracy` reads. Peers have no cache."""
    dim, page, queries = row[2], row[5], row[6]
    own = name.startswith("cuda.")
    fields = {"schedule": "fa3" if name in ("fa3", "cudnn", "cuda.fa3.forward") else "fa2", "len_kv": max(lengths),
              "head_dim_v": dim, "mask": "causal bottom-right" if queries > 1 else "none", "deterministic": True}
    if page and own:
        fields["features"] = "cache" if page < 0 else f"cache in pages of {page}"
        fields["len_kv"] = -(-max(lengths) // max(page, 1)) * max(page, 1)
        fields["lens_q"], fields["lens_kv"] = [queries] * len(lengths), lengths
    return fields


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--kernels", default="cuda.decode.forward")
    parser.add_argument("--fa3", action="store_true", help="FlashAttention-3 by the package fa3-fwd beside the others")
    parser.add_argument("--set", choices=("short", "all"), default="all")
    parser.add_argument("--before", help="another libtessera.so, whose cuda.decode.forward is timed too")
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    ours = [(name, name, abi.Library(options.library)) for name in options.kernels.split(",")]
    if options.before: ours.append(("before", "cuda.decode.forward", abi.Library(options.before)))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    speed = probe()
    peers = (["fa3"] if options.fa3 and dtype == torch.bfloat16 else []) + ["fa2", "cudnn"]
    columns = [name for name, _, _ in ours] + peers
    print(f"{torch.cuda.get_device_name()}, read probe {speed:.0f} GB/s; us (share of the probe)")
    print(f"{'heads':>7} {'dim':>5} {'batch x len':>15} {'cache':>9} {'q':>2}" +
          "".join(f"{n.removeprefix('cuda.').removesuffix('.forward'):>16}" for n in columns))
    for row in ALL if options.set == "all" else SHORT:
        heads_q, heads_kv, dim, batch, length, page, queries = row
        torch.cuda.empty_cache()
        lengths = lengths_of(batch, length)
        make = lambda heads, rows: torch.randn(batch, rows, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
        q, k, v = make(heads_q, queries), make(heads_kv, max(lengths)), make(heads_kv, max(lengths))
        want_o, want_lse = gold(q, k, v, lengths)
        shape, tensors = our_tensors(row, q, k, v, lengths)
        calls = {}
        for name, kernel, lib in ours:
            o = torch.full_like(q, math.nan)
            lse = torch.full((batch, heads_q, queries), math.nan, device="cuda")
            own = abi.Options(struct_size=ctypes.sizeof(abi.Options), kernel=kernel.encode())
            try:
                calls[name] = lib.prepare(shape, own, abi.FORWARD, dict(tensors, o=o, lse=lse))
                calls[name]()
            except RuntimeError as error:
                calls.pop(name, None)
                if name != "before": print(f"{name}: {str(error).splitlines()[0]}")
                continue
            error = ((o.float() - want_o).norm() / want_o.norm()).item()
            lse_error = (lse - want_lse).abs().max().item()
            if not (error < 5e-3 and lse_error < 1e-3):
                print(f"WRONG {name} {shape}: O {error}, LSE {lse_error}")

        def torch_call(backend):
            def call():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads_q != heads_kv)
            return call
        if length != "zipf":
            made = {"fa3": lambda: torch_cuda.fa3_call(q, k, v, queries > 1)}
            if queries == 1:
                made |= {"fa2": lambda: torch_call(SDPBackend.FLASH_ATTENTION), "cudnn": lambda: torch_call(SDPBackend.CUDNN_ATTENTION)}
            for name in peers:
                try:
                    call = made[name]()
                    call()
                    calls[name] = call
                except (RuntimeError, KeyError):
                    pass
        times = torch_cuda.times_of(calls, options.repeat, flush)
        size = sum(lengths) * heads_kv * dim * 2 * 2
        cache = {0: "", -1: "slots"}.get(page, f"page {page}")
        line = f"{heads_q:>4}/{heads_kv:<2} {dim:>5} {batch:>5} x {length:<7} {cache:>9} {queries:>2}"
        for name in columns:
            if name not in times:
                line += " " * 15 + "-"
                continue
            us = statistics.median(times[name]) * 1e3
            line += f"{us:9.1f} ({size / us * 1e-3 / speed:4.2f})"
            if options.out:
                own = name.startswith("cuda.")
                record = {"what": "measured", "by": "tessera" if own else name, "kernel": name if own else "", "pass": "forward",
                          "dtype": options.dtype, "batch": batch, "len_q": queries, "lengths": str(length), "cache": cache,
                          "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim, "ms": us * 1e-3,
                          **as_problem(row, name, lengths), "set": "short" if row in SHORT else "rest", "gb_per_s": size / us * 1e-3, "probe_gb_per_s": speed,
                          "device": torch.cuda.get_device_name(), "clock_mhz": int(torch_cuda.query("clocks.sm") or 0),
                          "versions": {"tessera": ours[0][2].version(), "torch": torch.__version__,
                                       "driver": torch_cuda.query("driver_version")},
                          "date": datetime.date.today().isoformat(), "commit": options.commit}
                with open(options.out, "a") as out:
                    out.write(json.dumps(record) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
