#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times tessera's CUDA backward with softcap, ALiBi and dropout, in fp16, and on short rows, in one process.

    python3 bench/compare/cuda_features_backward.py build/src/libtessera.so [--before other/libtessera.so] [--repeat 9]

Each case starts from O, LSE and the residual of O (where the plan takes it) of tessera's forward. Beside it stand
PyTorch's cuDNN and FlashAttention-2, where they take the case, and another build of the library, whose gradients are
compared with this one's: the largest relative difference of norms is printed. Before each call 256 MiB are written, so
that no operand is left in L2; medians over alternating calls, between CUDA events, in microseconds.
"""
import argparse
import ctypes
import math
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
from torch_cuda import times_of

DROPOUT = dict(dropout_probability=0.1, dropout_seed=5)
SOFTCAP = dict(softcap=30.0)
ALIBI = dict(alibi=1)
# name: batch, queries, keys, heads, head_dim, causal
LONG = {"128 causal 2 x 4k": (2, 4096, 4096, 16, 128, 1), "128 causal 4 x 2k": (4, 2048, 2048, 16, 128, 1),
        "128 full 2 x 4k": (2, 4096, 4096, 16, 128, 0), "64 causal 8 x 1k": (8, 1024, 1024, 16, 64, 1),
        "64 causal 4 x 4k": (4, 4096, 4096, 32, 64, 1)}
SHORT = {"64 x 197, 12 of 64": (64, 197, 197, 12, 64, 0), "32 x 729, 16 of 72": (32, 729, 729, 16, 72, 0),
         "2 x 4,096 on 77, 8 of 64": (2, 4096, 77, 8, 64, 0), "2 x 4,096, 10 of 64": (2, 4096, 4096, 10, 64, 0),
         "32 x 512, 16 of 64": (32, 512, 512, 16, 64, 0)}


def cases():
    """Yields a name, the shape, fields of a tessera_problem, the dtype, and a factor of the scores."""
    for name, shape in LONG.items():
        yield name, shape, {}, torch.bfloat16, 1
        yield f"{name}, softcap 30", shape, SOFTCAP, torch.bfloat16, 1
        yield f"{name}, softcap 30, large scores", shape, SOFTCAP, torch.bfloat16, 20
        yield f"{name}, ALiBi", shape, ALIBI, torch.bfloat16, 1
        yield f"{name}, dropout 0.1", shape, DROPOUT, torch.bfloat16, 1
    for name in ("128 causal 2 x 4k", "64 causal 8 x 1k"):
        for feature, fields in (("plain", {}), ("softcap 30", SOFTCAP), ("ALiBi", ALIBI), ("dropout 0.1", DROPOUT)):
            yield f"fp16 {name}, {feature}", LONG[name], fields, torch.float16, 1
    for name, shape in SHORT.items():
        yield name, shape, {}, torch.bfloat16, 1


def prepare(lib, problem, tensors, d_o, slopes):
    """Returns a function that runs the backward, and its gradients."""
    q, k, v = tensors
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA)
    kept = dict(o=torch.empty_like(q), lse=torch.empty(q.shape[:3], device="cuda"))
    if lib.plan(problem, options, abi.BACKWARD).o_residual:
        kept["o_residual"] = torch.empty_like(q, dtype=torch.int8)
    lib.prepare(problem, options, abi.FORWARD, dict(q=q, k=k, v=v, **kept, **slopes))()
    gradients = {name: torch.full_like(t, math.nan) for name, t in zip(("dq", "dk", "dv"), tensors)}
    return lib.prepare(problem, options, abi.BACKWARD,
                       dict(q=q, k=k, v=v, d_o=d_o, **kept, **gradients, **slopes)), gradients


def peers(tensors, d_o, causal, dropout):
    """The backwards of PyTorch that take the case, by name."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    calls = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                o = F.scaled_dot_product_attention(*leaves, is_causal=bool(causal), dropout_p=dropout)
        except RuntimeError:
            continue
        calls[name] = lambda o=o: torch.autograd.grad(o, leaves, d_o, retain_graph=True)
    return calls


def difference(a, b):
    return max(((a[n].float() - b[n].float()).norm() / b[n].float().norm()).item() for n in a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--before", metavar="LIBRARY", help="another build of the library")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    libraries = {"tessera": abi.Library(options.library)}
    if options.before:
        libraries["before"] = abi.Library(options.before)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for name, (batch, len_q, len_kv, heads, dim, causal), fields, dtype, factor in cases():
        torch.manual_seed(0)
        q, k, v, d_o = (torch.randn(batch, n, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
                        for n in (len_q, len_kv, len_kv, len_q))
        q *= factor
        problem = dict(dtype=abi.DTYPES[dtype], batch=batch, len_q=len_q, len_kv=len_kv, heads_q=heads, heads_kv=heads,
                       head_dim=dim, head_dim_v=dim, causal=causal, **fields)
        slopes = {}
        if "alibi" in fields:
            slopes["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device="cuda")
        prepared = {n: prepare(lib, problem, (q, k, v), d_o, slopes) for n, lib in libraries.items()}
        calls = {n: call for n, (call, _) in prepared.items()}
        if not fields or fields is DROPOUT:
            calls |= peers((q, k, v), d_o, causal, fields.get("dropout_probability", 0.0))
        times = {n: 1e3 * statistics.median(t) for n, t in times_of(calls, options.repeat, flush).items()}
        line = f"{name}: " + ", ".join(f"{n} {t:.0f}" + (f" ({t / times['tessera']:.2f})" if n != "tessera" else "")
                                       for n, t in times.items())
        if "before" in prepared:
            line += f", differs {difference(prepared['tessera'][1], prepared['before'][1]):.1e}"
        print(line, flush=True)
        del prepared, calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
