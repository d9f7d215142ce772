#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times packed documents (ragged batches, causal) beside FlashAttention-2's and -3's varlen kernels in one process.

    python3 bench/compare/cuda_packed.py build/src/libtessera.so [--fa3] [--means 64,1024] [--distribution zipf] [--out rows.jsonl]

Each row draws lengths of documents until they fill the batch, and times both passes of tessera by three bounds of the lengths: the
longest document, ten times that, and all tokens (what a caller says who knows no length). "dense" is a batch of equal documents
with as many visible pairs for each token, by the same kernels. FlashAttention-2 is PyTorch's, -3 the package `fa3-fwd` (it has no
backward) with num_splits=1, the default of flash_attn_varlen_func. Figures are TFLOP/s over visible pairs: medians over calls in random order with a cold L2, between CUDA events. Before
timing, O, LSE, dQ, dK and dV are compared with FlashAttention-2's, to 2 % of their norms; tessera's bits must not depend on the bound.
"""
import argparse
import ctypes
import json
import random
import statistics
import sys

import torch

import abi
from torch_cuda import query, times_of

OPTIONS = dict(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA)


def draw_lengths(draw, distribution, mean, total):
    """Lengths of documents that fill `total` tokens."""
    if distribution == "giant":  # one long document among short ones
        lengths = [total // 2]
        one = lambda: draw.expovariate(1 / mean)
    elif distribution == "two":
        lengths = []
        one = lambda: mean / 4 if draw.random() < 0.8 else 4 * mean
    elif distribution == "zipf":
        lengths = []
        one = lambda: mean / 4 * draw.paretovariate(1.2)
    else:
        lengths = []
        one = lambda: draw.expovariate(1 / mean)
    while sum(lengths) < total:
        lengths.append(min(max(1, round(one())), total - sum(lengths)))
    draw.shuffle(lengths)
    return lengths


class Tensors:
    """Inputs, outputs and gradients of one batch of documents: [tokens, heads, head_dim]."""

    def __init__(self, lengths, heads_q, heads_kv, dim):
        self.lengths, self.heads_q, self.heads_kv, self.dim = lengths, heads_q, heads_kv, dim
        total = sum(lengths)
        make = lambda heads: torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v, self.d_o = make(heads_q), make(heads_kv), make(heads_kv), make(heads_q)
        self.offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    def flop(self, backward):
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        return (10 if backward else 4) * self.heads_q * self.dim * pairs

    def calls(self, lib, bound):
        """tessera's forward and backward, and their outputs, for a bound of the lengths."""
        total = self.q.shape[0]
        shape = dict(dtype=abi.BF16, batch=len(self.lengths), len_q=bound, len_kv=bound, heads_q=self.heads_q, heads_kv=self.heads_kv,
                     head_dim=self.dim, head_dim_v=self.dim, causal=1, ragged=1, total_q=total, total_kv=total)
        offsets = dict(cu_seqlens_q=self.offsets, cu_seqlens_kv=self.offsets)
        out = dict(o=torch.empty_like(self.q), lse=torch.empty(self.heads_q, total, device="cuda"))
        options = abi.Options(**OPTIONS)
        if lib.plan(shape, options, abi.BACKWARD).o_residual and lib.plan(shape, options, abi.FORWARD).o_residual:
            out["o_residual"] = torch.empty_like(self.q, dtype=torch.int8)
        inputs = dict(q=self.q, k=self.k, v=self.v, **offsets, **out)
        gradients = dict(dq=torch.empty_like(self.q), dk=torch.empty_like(self.k), dv=torch.empty_like(self.v))
        forward = lib.prepare(shape, options, abi.FORWARD, inputs)
        backward = lib.prepare(shape, options, abi.BACKWARD, dict(inputs, d_o=self.d_o, **gradients))
        forward()
        backward()
        return forward, backward, dict(o=out["o"], lse=out["lse"], **gradients)

    def fa2(self):
        aten, most = torch.ops.aten, max(self.lengths)
        options = (self.offsets, self.offsets, most, most, 0.0, True)
        run = lambda: aten._flash_attention_forward(self.q, self.k, self.v, *options, False)
        o, lse, seed, offset = run()[:4]
        back = lambda: aten._flash_attention_backward(self.d_o, self.q, self.k, self.v, o, lse, *options, seed, offset)
        return run, back, dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *back())))

    def fa3(self):
        import fa3_fwd._C  # noqa: F401  (registers torch.ops.fa3_fwd)
        most = max(self.lengths)
        return lambda: torch.ops.fa3_fwd.fwd(self.q, self.k, self.v, cu_seqlens_q=self.offsets, cu_seqlens_k=self.offsets,
                                             max_seqlen_q=most, max_seqlen_k=most, is_causal=True, num_splits=1)


def compare(got, right):
    for name, r in right.items():
        error = ((got[name].float() - r.float()).norm() / r.float().norm()).item()
        if not error < 2e-2:
            sys.exit(f"wrong {name}: {error} of FlashAttention-2's norm")


def measure(lib, tensors, dense, fa3, repeat, flush):
    """Seconds by (pass, name)."""
    most, total = max(tensors.lengths), tensors.q.shape[0]
    calls = {}
    run, back, right = tensors.fa2()
    calls["forward", "fa2"], calls["backward", "fa2"] = run, back
    if fa3:
        calls["forward", "fa3"] = tensors.fa3()
    first = None
    for name, bound in (("tessera", most), ("bound x 10", min(10 * most, total)), ("no bound", total)):
        run, back, got = tensors.calls(lib, bound)
        compare(got, right)
        first = first or got
        for key, value in got.items():
            if not torch.equal(value, first[key]):
                sys.exit(f"{key} depends on the bound of the lengths")
        calls["forward", name], calls["backward", name] = run, back
    run, back, _ = dense.calls(lib, max(dense.lengths))
    calls["forward", "dense"], calls["backward", "dense"] = run, back
    return {key: 1e-3 * statistics.median(t) for key, t in times_of(calls, repeat, flush).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--fa3", action="store_true", help="FlashAttention-3's forward by the package fa3-fwd")
    parser.add_argument("--means", default="64,256,1024,4096,8192,32768")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--heads", default="16/16,32/32,32/8")
    parser.add_argument("--distribution", choices=("exponential", "zipf", "two", "giant"), default="exponential")
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch; at least four mean documents")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", help="append the figures (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    names = ["tessera", "bound x 10", "no bound", "dense", "fa2"] + (["fa3"] if options.fa3 else [])
    print("TFLOP/s over visible pairs\n heads  dim   mean documents pass     " + " ".join(f"{n:>10}" for n in names))
    common = {"device": torch.cuda.get_device_name(), "clock_mhz": int(query("clocks.sm") or 0), "torch": torch.__version__,
              "tessera": lib.version(), "commit": options.commit, "distribution": options.distribution, "seed": options.seed}
    for heads in options.heads.split(","):
        heads_q, heads_kv = map(int, heads.split("/"))
        for dim in map(int, options.dims.split(",")):
            for mean in map(int, options.means.split(",")):
                total = max(options.tokens, 4 * mean)
                lengths = draw_lengths(random.Random(f"{options.seed} {mean}"), options.distribution, mean, total)
                equal = max(1, round(sum(n * n for n in lengths) / total))
                tensors = Tensors(lengths, heads_q, heads_kv, dim)
                dense = Tensors([equal] * max(1, round(total / equal)), heads_q, heads_kv, dim)
                repeat = options.repeat if mean <= 8192 else max(3, options.repeat // 3)
                seconds = measure(lib, tensors, dense, options.fa3, repeat, flush)
                for direction in ("forward", "backward"):
                    of = lambda name: dense if name == "dense" else tensors
                    tflops = {n: of(n).flop(direction == "backward") / seconds[direction, n] * 1e-12
                              for n in names if (direction, n) in seconds}
                    print(f"{heads:>6} {dim:4} {mean:6} {len(lengths):9} {direction:8} " +
                          " ".join(f"{tflops[n]:10.0f}" if n in tflops else f"{'-':>10}" for n in names), flush=True)
                    if options.out:
                        row = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim, "mean": mean, "documents": len(lengths),
                               "tokens": total, "pass": direction, "tflops": tflops, **common}
                        with open(options.out, "a") as file:
                            file.write(json.dumps(row) + "\n")
                del tensors, dense
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
