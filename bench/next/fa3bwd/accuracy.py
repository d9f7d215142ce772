#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python3 bench/next/fa3bwd/accuracy.py build/src/libtessera.so

Errors of fp16 gradients beside fp64, as the worst block of 64 rows: relative RMSE of ours (with rest, summed, fa2) and PyTorch's FA2."""
import ctypes
import math
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "compare"))
import abi
from torch_backward import with_rest

L = abi.Library(sys.argv[1])
def gold(q, k, v, d_o):
    out = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)]
    for h in range(q.shape[1]):
        Q, K, V, D = (t[0, h].double() for t in (q, k, v, d_o))
        c = 1 / math.sqrt(Q.shape[1])
        for r in torch.arange(Q.shape[0], device="cuda").split(1024):
            p = torch.softmax(Q[r] @ K.T * c, -1); dp = D[r] @ V.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            out[0][0, h, r] = ds @ K * c; out[1][0, h] += ds.T @ Q[r] * c; out[2][0, h] += p.T @ D[r]
    return out
def worst(got, right):
    n, d = right.shape[2:]
    e = (got.double() - right).reshape(right.shape[1], n // 64, -1).norm(dim=-1); r = right.reshape(right.shape[1], n // 64, -1).norm(dim=-1)
    if not torch.isfinite(got).all(): return "inf"
    return f"{(e / r.clamp_min(1e-300)).max().item():.1e}"
n = 8192
ramp = torch.linspace(0, 1, n, device="cuda")[None, None, :, None]
cases = {"plain": (1, 1), "dO rows fall to 2^-10": (2 ** (-10 * ramp), 1), "dO rows fall to 2^-16": (2 ** (4 - 16 * ramp), 1),
         "one dO row x 1000": (1 + 999 * (ramp == ramp.flatten()[4000]), 1), "dO 2^-16": (2.0 ** -16, 1), "dO 2^12": (2.0 ** 12, 1),
         "one V row x 500": (1, 1 + 499 * (ramp == ramp.flatten()[100])), "dO 2^-12 V 2^-8": (2.0 ** -12, 2.0 ** -8)}
for dim in (64, 128):
    torch.manual_seed(1)
    q, k, v0, d0 = (torch.randn(1, n, 2, dim, device="cuda").transpose(1, 2) for _ in range(4))
    shape = {"dtype": abi.FP16, "batch": 1, "len_q": n, "len_kv": n, "heads_q": 2, "heads_kv": 2, "head_dim": dim, "head_dim_v": dim}
    for name, (of_o, of_v) in cases.items():
        Q, K, V, D = q.half(), k.half(), (v0 * of_v).half(), (d0 * of_o).half()
        right = gold(Q, K, V, D)
        aten = torch.ops.aten
        o, lse, cq, ck, mq, mk, seed, off = aten._scaled_dot_product_flash_attention(Q, K, V, 0.0, False)[:8]
        res = {"FA2": aten._scaled_dot_product_flash_attention_backward(D, Q, K, V, o, lse, cq, ck, mq, mk, 0.0, False, seed, off)[:3]}
        for which, schedule in (("rest", "fa3"), ("sum", "fa3"), ("fa2", "fa2")):
            options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
            f = with_rest(L, shape, options, Q, K, V) if which == "rest" else dict(o=o, lse=lse)
            out = [torch.full_like(t, math.nan) for t in (Q, K, V)]
            L.prepare(shape, options, abi.BACKWARD, dict(q=Q, k=K, v=V, d_o=D, dq=out[0], dk=out[1], dv=out[2], **f))()
            res[which] = out
        print(dim, name, " | ".join(f"{w} " + " ".join(worst(g, r) for g, r in zip(got, right)) for w, got in res.items()), flush=True)
