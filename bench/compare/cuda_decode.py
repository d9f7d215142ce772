#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times few queries on many keys on a GPU, tessera's kernels beside FlashAttention-3 and PyTorch's FlashAttention-2 and
cuDNN.

    python3 bench/compare/cuda_decode.py build/src/libtessera.so [--kernels cuda.decode.forward,cuda.fa3.forward] [--fa3]
        [--set short|all|prefill|append] [--repeat 21] [--dtype bf16] [--before other/libtessera.so] [--out records.jsonl] [--commit HASH]

Each call is one layer's attention: K and V are read from memory, since 256 MiB are written before each call. A figure is
the median over calls in random order, between CUDA events, in microseconds, with the share of the read probe of the same
run (the sum of 4 GiB of floats) that the bytes of K and V of live keys stand for. "page N" is a cache in pages of N
tokens in random order; "slots" is a contiguous cache with lengths on the device. Peers have the same keys without a
cache. Before timing, O is compared with fp32 to 5e-3 of its norm, and LSE to 1e-3. --before times another build too.

--set prefill times a chunk of a prompt on pages that hold older keys, by cuda.decode.forward and cuda.fa3.forward, beside
cuda.fa3.forward on the same keys without a cache: microseconds, TFLOP/s over visible pairs, and bytes of workspace. --set append times CUDA graphs of a step of
decoding: attention alone, and the append of a token with rotary embedding before it. The share of the probe, and of the
appending graph the microseconds on top.
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


PREFILL = [(chunk, older, page) for chunk in (512, 2048, 8192) for older in (0, 32768) for page in (16, 256)]


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


def differs(o, want_o, lse, want_lse):
    """Words about wrong O and LSE, or none."""
    error, lse_error = ((o.float() - want_o.float()).norm() / want_o.float().norm()).item(), (lse - want_lse).abs().max().item()
    return "" if error < 5e-3 and lse_error < 1e-3 else f"WRONG: O {error}, LSE {lse_error}"


def write(options, lib, rows):
    """Appends Records with what all of a run have in common."""
    if not options.out: return
    common = {"what": "measured", "by": "tessera", "pass": "forward", "dtype": options.dtype, "deterministic": True,
              "device": torch.cuda.get_device_name(), "clock_mhz": int(torch_cuda.query("clocks.sm") or 0),
              "versions": {"tessera": lib.version(), "torch": torch.__version__, "driver": torch_cuda.query("driver_version")},
              "date": datetime.date.today().isoformat(), "commit": options.commit}
    with open(options.out, "a") as out:
        out.writelines(json.dumps({**row, **common}) + "\n" for row in rows)


def prefill(lib, options, dtype, flush):
    """Chunks of a prompt of 32/8 heads of 128, causal, on older keys in pages."""
    heads_q, heads_kv, dim = 32, 8, 128
    kinds = {"pages": ("cuda.decode.forward", True), "pages, fa3": ("cuda.fa3.forward", True), "no cache, fa3": ("cuda.fa3.forward", False)}
    print(f"{'chunk':>6} {'older':>6} {'page':>5}" + "".join(f"{n:>14}{'TFLOP/s':>9}{'workspace':>15}" for n in kinds))
    for chunk, older, page in PREFILL:
        torch.cuda.empty_cache()
        keys = older + chunk
        make = lambda heads, rows: torch.randn(1, rows, heads, dim, device=flush.device, dtype=dtype).transpose(1, 2)
        q, k, v = make(heads_q, chunk), make(heads_kv, keys), make(heads_kv, keys)
        calls, bytes_of, results = {}, {}, {}
        for name, (kernel, cached) in kinds.items():
            shape, tensors = our_tensors((heads_q, heads_kv, dim, 1, keys, page if cached else 0, chunk), q, k, v, [keys])
            own = abi.Options(struct_size=ctypes.sizeof(abi.Options), kernel=kernel.encode(), backend=abi.CUDA)
            bytes_of[name] = lib.workspace_bytes(lib.problem(shape), own, abi.FORWARD)
            results[name] = dict(o=torch.full_like(q, math.nan), lse=torch.full((1, heads_q, chunk), math.nan, device=q.device))
            calls[name] = lib.prepare(shape, own, abi.FORWARD, dict(tensors, **results[name]))
            calls[name]()
        times = {name: statistics.median(t) * 1e3 for name, t in torch_cuda.times_of(calls, options.repeat, flush).items()}
        flop = 4 * heads_q * dim * (chunk * older + chunk * (chunk + 1) // 2)
        wrong = " ".join(differs(*(results[n][t] for t in ("o", "lse") for n in (name, "no cache, fa3"))) for name in kinds)
        bits = all(torch.equal(results["pages, fa3"][t], results["no cache, fa3"][t]) for t in ("o", "lse"))
        print(f"{chunk:>6} {older:>6} {page:>5}" +
              "".join(f"{us:14.1f}{flop / us * 1e-6:9.1f}{bytes_of[name]:15,}" for name, us in times.items()) +
              f"  {wrong} fa3's bits {'equal' if bits else 'differ'}", flush=True)
        write(options, lib, [{"kernel": kinds[name][0], "schedule": "fa2" if "decode" in kinds[name][0] else "fa3", "batch": 1, "len_q": chunk,
                              "len_kv": -(-keys // page) * page if kinds[name][1] else keys, "heads_q": heads_q, "heads_kv": heads_kv,
                              "head_dim": dim, "head_dim_v": dim, "mask": "causal bottom-right", "ms": us * 1e-3,
                              "tflops": flop / us * 1e-6, "workspace_bytes": bytes_of[name], "set": "prefill",
                              **({"features": f"cache in pages of {page}", "lens_q": [chunk], "lens_kv": [keys]} if kinds[name][1] else {})}
                             for name, us in times.items()])


def append_call(lib, tensors):
    """A function that appends the new rows, and turns them and q by rotary embedding."""
    kind = abi.struct_of("tessera_append_args")
    args = kind(struct_size=ctypes.sizeof(kind), **{name: abi.view(t) for name, t in tensors.items()})
    own = abi.Options(struct_size=ctypes.sizeof(abi.Options))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream) if tensors["k"].is_cuda else None
    return lambda: lib.check(lib.lib.tessera_append(ctypes.byref(args), ctypes.byref(own), stream))


def turned(x, cos, sin):
    """x [..., head_dim] by rotary embedding, pairs i and i + head_dim / 2, in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def append(lib, options, dtype, flush, speed):
    """Steps of decoding of 32 sequences of 32/8 heads of 128 with 4,096 keys, the last of which is new."""
    heads_q, heads_kv, dim, batch, keys = 32, 8, 128, 32, 4096
    print(f"{'cache':>9} {'decode':>16} {'append + decode':>20} {'on top':>8}")
    for page in (-1, 16):
        torch.cuda.empty_cache()
        make = lambda heads, rows: torch.randn(batch, rows, heads, dim, device=flush.device, dtype=dtype).transpose(1, 2)
        q, k, v = make(heads_q, 1), make(heads_kv, keys), make(heads_kv, keys)
        new_k, new_v, q_turned = k[:, :, -1:].clone(), v[:, :, -1:].clone(), torch.empty_like(q)
        angles = torch.rand(keys, dim // 2, device=q.device) * 6
        shape, cache = our_tensors((heads_q, heads_kv, dim, batch, keys, page, 1), q, k.clone(), v.clone(), [keys] * batch)
        results = dict(o=torch.full_like(q, math.nan), lse=torch.full((batch, heads_q, 1), math.nan, device=q.device))
        rows = dict(k=new_k, v=new_v, k_cache=cache["k"], v_cache=cache["v"], kv_lengths=cache["kv_lengths"] - 1, q=q,
                    q_out=q_turned, rotary_cos=angles.cos(), rotary_sin=angles.sin())
        if page > 0: rows["page_table"] = cache["page_table"]
        stream, graphs = torch.cuda.Stream(), {}
        with torch.cuda.stream(stream):
            own = abi.Options(struct_size=ctypes.sizeof(abi.Options), kernel=b"cuda.decode.forward")
            decode = lib.prepare(shape, own, abi.FORWARD, dict(cache, q=q_turned, **results))
            new = append_call(lib, rows)
            for name, call in (("decode", decode), ("append + decode", lambda: (new(), decode()))):
                call()
                stream.synchronize()
                graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[name], stream=stream): call()
        graphs["append + decode"].replay()
        cos, sin = angles[-1].cos(), angles[-1].sin()
        k[:, :, -1:] = turned(new_k, cos, sin).to(dtype)
        want = gold(turned(q, cos, sin).to(dtype), k, v, [keys] * batch)
        wrong = differs(results["o"], want[0], results["lse"], want[1])
        times = torch_cuda.times_of({name: graph.replay for name, graph in graphs.items()}, options.repeat, flush)
        us = {name: statistics.median(t) * 1e3 for name, t in times.items()}
        share = batch * keys * heads_kv * dim * 4 * 1e-3 / speed
        kind = "slots" if page < 0 else f"page {page}"
        print(f"{kind:>9} " + " ".join(f"{t:9.1f} ({share / t:4.2f})" for t in us.values()) +
              f" {us['append + decode'] - us['decode']:12.1f}  {wrong}", flush=True)
        write(options, lib, [{"kernel": "cuda.decode.forward", "schedule": "fa2", "batch": batch, "len_q": 1, "len_kv": keys, "heads_q": heads_q,
                              "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "mask": "none", "ms": t * 1e-3, "set": "append",
                              "features": ("cache" if page < 0 else f"cache in pages of {page}") +
                              (", append with rotary embedding" if name != "decode" else ""), "graph": name, "cache": kind,
                              "probe_gb_per_s": speed} for name, t in us.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--kernels", default="cuda.decode.forward")
    parser.add_argument("--fa3", action="store_true", help="FlashAttention-3 by the package fa3-fwd beside the others")
    parser.add_argument("--set", choices=("short", "all", "prefill", "append"), default="all")
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
    speed = probe() if options.set != "prefill" else 0
    if options.set == "prefill": return prefill(ours[0][2], options, dtype, flush)
    if options.set == "append": return append(ours[0][2], options, dtype, flush, speed)
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
