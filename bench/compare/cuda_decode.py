#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times one query (or a few) on many keys on a GPU, tessera's kernels beside PyTorch's FlashAttention-2 and cuDNN.

    python3 bench/compare/cuda_decode.py build/src/libtessera.so [--kernels cuda.decode.forward,cuda.fa3.forward]
        [--queries 1] [--repeat 21] [--dtype bf16] [--out records.jsonl] [--commit HASH]

Each call is one layer's attention: K and V are read from memory, since 256 MiB are written before each call. A figure is
the median over calls in random order, between CUDA events, in microseconds, with the share of the read probe of the same
run (the sum of 4 GiB of floats) that the bytes of K and V stand for. Before timing, O is compared with fp32 to 5e-3 of its
norm, and LSE to 1e-3.
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

ROWS = [  # heads_q, heads_kv, head_dim, batch, len
    (32, 8, 128, 1, 1024), (32, 8, 128, 1, 4096), (32, 8, 128, 1, 32768), (8, 1, 128, 1, 131072),
    (32, 8, 128, 1, 131072), (32, 8, 128, 16, 2048), (32, 8, 128, 32, 4096), (32, 8, 128, 64, 2048), (32, 8, 128, 16, 16384),
    (64, 8, 128, 1, 32768), (64, 8, 128, 32, 4096), (16, 16, 64, 16, 4096), (16, 16, 64, 1, 8192), (32, 32, 128, 8, 4096),
    (16, 8, 256, 16, 4096), (32, 4, 80, 16, 4096), (28, 4, 128, 16, 4096)]


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


def gold(q, k, v):
    group = q.shape[1] // k.shape[1]
    o, lse = torch.empty_like(q, dtype=torch.float32), torch.empty(q.shape[:3], device=q.device)
    for b in range(q.shape[0]):
        s = q[b].float().unflatten(0, (-1, group)) @ k[b, :, None].float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None]
        s = s.masked_fill(j > i + k.shape[2] - q.shape[2], -math.inf)
        lse[b] = torch.logsumexp(s, -1).flatten(0, 1)
        o[b] = (torch.softmax(s, -1) @ v[b, :, None].float()).flatten(0, 1)
    return o, lse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--kernels", default="cuda.decode.forward,cuda.fa3.forward")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    speed = probe()
    names = options.kernels.split(",")
    print(f"{torch.cuda.get_device_name()}, read probe {speed:.0f} GB/s, {options.queries} queries; us (share of the probe)")
    print("   heads  dim  batch x len     " + "".join(f"{n.removeprefix('cuda.').removesuffix('.forward'):>15}" for n in [*names, "torch fa2", "cudnn"]))
    for heads_q, heads_kv, dim, batch, length in ROWS:
        torch.cuda.empty_cache()
        make = lambda heads, rows: torch.randn(batch, rows, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
        q, k, v = make(heads_q, options.queries), make(heads_kv, length), make(heads_kv, length)
        shape = {"dtype": abi.DTYPES[dtype], "batch": batch, "len_q": options.queries, "len_kv": length, "heads_q": heads_q,
                 "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "causal": 2 if options.queries > 1 else 0}
        calls = {}
        want_o, want_lse = gold(q, k, v)
        for name in names:
            o = torch.full_like(q, math.nan)
            lse = torch.full((batch, heads_q, options.queries), math.nan, device="cuda")
            own = abi.Options(struct_size=ctypes.sizeof(abi.Options), kernel=name.encode())
            try:
                calls[name] = lib.prepare(shape, own, abi.FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}")
                continue
            calls[name]()
            error = ((o.float() - want_o).norm() / want_o.norm()).item()
            lse_error = (lse - want_lse).abs().max().item()
            if not (error < 5e-3 and lse_error < 1e-3):
                print(f"WRONG {name} {shape}: O {error}, LSE {lse_error}")
        def torch_call(backend):
            def call():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads_q != heads_kv)
            return call
        if options.queries == 1:
            for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                try:
                    torch_call(backend)()
                    calls[name] = torch_call(backend)
                except RuntimeError:
                    pass
        times = torch_cuda.times_of(calls, options.repeat, flush)
        size = batch * length * heads_kv * dim * 2 * 2
        line = f"{heads_q:>5}/{heads_kv:<3} {dim:>3} {batch:>5} x {length:<7} "
        for name in [*names, "fa2", "cudnn"]:
            if name not in times:
                line += " " * 14 + "-"
                continue
            us = statistics.median(times[name]) * 1e3
            line += f"{us:8.1f} ({size / us * 1e-3 / speed:4.2f})"
            if options.out:
                by, _, rest = name.partition(".")
                record = {"what": "measured", "by": "tessera" if rest else name, "kernel": name if rest else "", "pass": "forward",
                          "dtype": options.dtype, "batch": batch, "len_q": options.queries, "len_kv": length, "heads_q": heads_q,
                          "heads_kv": heads_kv, "head_dim": dim, "ms": us * 1e-3, "gb_per_s": size / us * 1e-3, "probe_gb_per_s": speed,
                          "device": torch.cuda.get_device_name(), "clock_mhz": int(torch_cuda.query("clocks.sm") or 0),
                          "versions": {"tessera": lib.version(), "torch": torch.__version__, "driver": torch_cuda.query("driver_version")},
                          "date": datetime.date.today().isoformat(), "commit": options.commit}
                with open(options.out, "a") as out:
                    out.write(json.dumps(record) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
