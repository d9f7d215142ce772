#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of features and short rows in tessera's CUDA forward, each beside the plain call of its head_dim in one process.

    python3 bench/compare/cuda_features.py build/src/libtessera.so [--schedule fa3] [--parts features,short] [--out file.jsonl]

features: time of a visible pair without the feature / with it (bf16, 2,048 numbers a token, causal; 1 would be no cost).
short: microseconds of short rows, or rows with few queries, beside PyTorch's FlashAttention-2 and cuDNN if they take them.
Before each call 256 MiB are written, so that no operand is left in L2; medians over alternating calls, between CUDA events.
"""
import argparse
import ctypes
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
from torch_cuda import times_of

CAUSAL = 1  # bottom right


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def visible(len_q, len_kv, causal, left):
    """Pairs of one head that are not hidden."""
    if not causal:
        return len_q * len_kv
    keys = [min(q + len_kv - len_q + 1, len_kv) for q in range(len_q)]
    return sum(max(min(k, left + 1), 0) if left is not None else max(k, 0) for k in keys)


class Case:
    """One call of tessera. `fields`: fields of a tessera_problem besides the shape."""

    def __init__(self, lib, schedule, name, batch, len_q, len_kv, heads_q, heads_kv, dim, scores=1.0, ragged=None, **fields):
        self.name = name
        self.pairs = heads_q * (sum(visible(n, n, CAUSAL, None) for n in ragged) if ragged else
                                batch * visible(len_q, len_kv, fields.get("causal", 0), fields.get("window_left")))
        shape = dict(dtype=abi.BF16, batch=batch, len_q=len_q, len_kv=len_kv, heads_q=heads_q, heads_kv=heads_kv,
                     head_dim=dim, head_dim_v=dim, **fields)
        if ragged:
            total = sum(ragged)
            shape.update(ragged=1, batch=len(ragged), len_q=max(ragged), len_kv=max(ragged), total_q=total, total_kv=total)
            q, k, v = (rand(total, heads, dim) for heads in (heads_q, heads_kv, heads_kv))
            lse = torch.empty((heads_q, total), device="cuda")
        else:
            q, k, v = (rand(batch, n, heads, dim).transpose(1, 2)
                       for n, heads in ((len_q, heads_q), (len_kv, heads_kv), (len_kv, heads_kv)))
            lse = torch.empty((batch, heads_q, len_q), device="cuda")
        q *= scores
        tensors = dict(q=q, k=k, v=v, o=torch.empty_like(q), lse=lse)
        if ragged:
            rows = torch.tensor([0, *ragged], device="cuda").cumsum(0).to(torch.int32)
            tensors |= dict(cu_seqlens_q=rows, cu_seqlens_kv=rows)
        if shape.get("alibi"):
            tensors["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / heads_q) for h in range(heads_q)], device="cuda")
        self.tensors = tensors
        options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
        self.call = lib.prepare(shape, options, abi.FORWARD, tensors)


def feature_cases(make, dim):
    heads = 2048 // dim
    plain = dict(batch=4, len_q=4096, len_kv=4096, heads_q=heads, heads_kv=heads, dim=dim, causal=CAUSAL)
    with_ = lambda **other: {**plain, **other}
    yield make("plain", **plain)
    yield make("8 query heads on one of keys", **with_(heads_kv=heads // 8))
    yield make("ragged, six sequences of 512 to 5,632", **with_(ragged=[512, 1536, 2560, 3584, 4608, 5632]))
    yield make("2,048 queries on 6,144 keys", **with_(len_q=2048, len_kv=6144))
    yield make("softcap, scores that are small beside it", **with_(softcap=50.0))
    yield make("softcap, scores that are not", **with_(softcap=50.0, scores=40.0))
    yield make("the same scores, no softcap", **with_(scores=40.0))
    yield make("ALiBi", **with_(alibi=1))
    yield make("dropout of 0.1", **with_(dropout_probability=0.1, dropout_seed=1))
    yield make("dropout of 0.5", **with_(dropout_probability=0.5, dropout_seed=1))
    long = with_(batch=1, len_q=16384, len_kv=16384)
    yield make("plain at 16k", **long)
    yield make("window of 1,024 keys at 16k", **{**long, "window_left": 1023, "window_right": 0})


def short_cases(make):
    shape = lambda batch, len_q, len_kv, heads_q, heads_kv, dim, **more: dict(
        batch=batch, len_q=len_q, len_kv=len_kv, heads_q=heads_q, heads_kv=heads_kv, dim=dim, **more)
    yield make("64 x 197, 12 heads of 64", **shape(64, 197, 197, 12, 12, 64))
    yield make("64 x 128 causal, 32 heads of 64", **shape(64, 128, 128, 32, 32, 64, causal=CAUSAL))
    yield make("8 x 1,024 causal, 12 heads of 64", **shape(8, 1024, 1024, 12, 12, 64, causal=CAUSAL))
    yield make("1 x 1,500, 40/8 heads of 128", **shape(1, 1500, 1500, 40, 8, 128))
    yield make("4 x 300 on 4,000, 16 heads of 128", **shape(4, 300, 4000, 16, 16, 128))
    for batch, len_q, len_kv in ((64, 1, 4096), (16, 4, 8192), (16, 16, 4096), (4, 16, 16384), (8, 64, 4096)):
        yield make(f"{batch} x {len_q} on {len_kv:,}, 64/8 heads of 128", **shape(batch, len_q, len_kv, 64, 8, 128))
    yield make("16 x 16 on 4,096 causal, 64/8 heads of 128", **shape(16, 16, 4096, 64, 8, 128, causal=CAUSAL))
    yield make("64 x 1 on 4,096, 32/8 heads of 64", **shape(64, 1, 4096, 32, 8, 64))


def peers_of(case):
    """PyTorch's kernels on the tensors of a call without a mask, or with the causal mask of a square."""
    q, k, v = (case.tensors[n] for n in "qkv")
    causal = case.pairs != q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if q.dim() != 4 or (causal and q.shape[2] != k.shape[2]):
        return {}
    calls = {}
    for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        def call(backend=backend):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        try:
            call()
        except RuntimeError as error:
            print(f"{name}, {case.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        calls[name] = call
    return calls


def medians(calls, repeat, flush):
    """The median microseconds of each call, in alternation, with a cold L2."""
    return {name: 1e3 * statistics.median(t) for name, t in times_of(calls, repeat, flush).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", nargs="+", help="several: each beside the others, in turn")
    parser.add_argument("--schedule", default="fa3")
    parser.add_argument("--parts", default="features,short")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", help="append the figures (JSON lines) to this file")
    options = parser.parse_args()
    libraries = [abi.Library(path) for path in options.library]
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    rows = []
    for lib, path in zip(libraries, options.library):
        make = lambda name, lib=lib, **shape: Case(lib, options.schedule, name, **shape)
        if "features" not in options.parts:
            continue
        for dim in (64, 128):
            cases = list(feature_cases(make, dim))
            us = medians({case.name: case.call for case in cases}, options.repeat, flush)
            for case in cases:
                plain = next(c for c in cases if c.name == ("plain at 16k" if "16k" in case.name else "plain"))
                of_plain = us[plain.name] / plain.pairs / (us[case.name] / case.pairs)
                rows.append({"library": path, "head_dim": dim, "feature": case.name, "us": us[case.name], "of_plain": of_plain})
                print(f"{dim:4} {case.name:45} {us[case.name]:9.1f} us  {of_plain:5.2f} of plain", flush=True)
            del cases
            torch.cuda.empty_cache()
    if "short" in options.parts:
        sets = [list(short_cases(lambda name, lib=lib, **shape: Case(lib, options.schedule, name, **shape))) for lib in libraries]
        for cases in zip(*sets):
            calls = {f"tessera {i}" if i else "tessera": case.call for i, case in enumerate(cases)} | peers_of(cases[0])
            us = medians(calls, options.repeat, flush)
            rows.append({"short": cases[0].name, "us": us})
            print(f"{cases[0].name:45} " + "  ".join(f"{name} {t:8.1f}" for name, t in us.items()), flush=True)
    if options.out:
        with open(options.out, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
