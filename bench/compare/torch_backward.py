# SPDX-License-Identifier: Apache-2.0
"""Times the backward for torch_cuda.py beside PyTorch's FlashAttention-2 (by its own operator) and cuDNN. Before timing, each of
tessera's results is compared with PyTorch's in fp32, for the first sequence's last kv head: dQ of the last 512 queries, dK and
dV of the last 512 keys, to 2 % of their norms. This detects grossly wrong kernels only.

If a backward of tessera takes the residual of O (docs/numerics.md), it gets it with O and LSE from tessera's default forward, as
in training; this is "tessera fa3". "tessera fa3 summed" is the same kernel without the residual. The others start from
PyTorch's O and LSE."""
import ctypes
import math
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi

TAIL = 512


def gold(q, k, v, d_o, causal):
    """dQ, dK and dV of the last rows of the first sequence's last kv head, in fp32, unfused and in blocks of queries."""
    group = q.shape[1] // k.shape[1]
    q, d_o = q[0, -group:].float(), d_o[0, -group:].float()
    k, v = k[0, -1].float(), v[0, -1].float()
    scale = 1 / math.sqrt(q.shape[-1])
    dk, dv, dq = torch.zeros_like(k), torch.zeros_like(v), None
    keys = torch.arange(k.shape[0], device=k.device)
    for head in range(group):
        for rows in torch.arange(q.shape[1], device=q.device).split(TAIL):
            s = q[head, rows] @ k.T * scale
            if causal: s = s.masked_fill(keys[None] > rows[:, None], -math.inf)
            p = torch.softmax(s, -1)
            dp = d_o[head, rows] @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dv += p.T @ d_o[head, rows]
            dk += ds.T @ q[head, rows] * scale
            dq = ds @ k * scale
    return dq, dk[-TAIL:], dv[-TAIL:]


def check(name, right, dq, dk, dv):
    for which, got, expected in zip(("dQ", "dK", "dV"), (dq, dk, dv), right):
        error = ((got[0, -1, -expected.shape[0]:].float() - expected).norm() / expected.norm()).item()
        if not error < 2e-2:
            sys.exit(f"wrong {which} of {name}: {error}")


def peers(q, k, v, d_o, causal):
    """Returns functions that run the backward of PyTorch's FlashAttention-2 and of cuDNN, and O and LSE of the former. cuDNN's
    operator requires a bias, so it goes through autograd: its host work overlaps the flush of the L2."""
    aten, causal = torch.ops.aten, bool(causal)
    o, lse, cum_q, cum_k, max_q, max_k, seed, offset = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:8]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    def cudnn(): return torch.autograd.grad(out, leaves, d_o, retain_graph=True)

    cudnn.notes = {"features": "autograd"}  # the model leaves such Records out: they have up to 0.2 ms of the host's
    return {"fa2": lambda: aten._scaled_dot_product_flash_attention_backward(
                d_o, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset),
            "cudnn": cudnn}, o, lse


def with_residual(lib, shape, options, q, k, v):
    """O, LSE and the residual of O by tessera's forward if the backward of these options takes it; otherwise nothing."""
    any_schedule = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA)
    if not (lib.plan(shape, options, abi.BACKWARD).o_residual and lib.plan(shape, any_schedule, abi.FORWARD).o_residual): return None
    kept = dict(o=torch.empty_like(q), lse=torch.empty(q.shape[:3], device=q.device),
                o_residual=torch.empty_like(q, dtype=torch.int8))
    lib.prepare(shape, any_schedule, abi.FORWARD, dict(q=q, k=k, v=v, **kept))()
    return kept


def calls_of(lib, row, schedules, residual="kept", dtype=torch.bfloat16):
    """residual: "kept": with the residual of O if that is taken; "summed": without; "both"."""
    dim, heads_q, heads_kv, causal, batch, length = row[:6]
    make = lambda heads: torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
    q, k, v, d_o = make(heads_q), make(heads_kv), make(heads_kv), make(heads_q)
    shape = {"dtype": abi.DTYPES[dtype], "batch": batch, "len_q": length, "len_kv": length, "heads_q": heads_q, "heads_kv": heads_kv,
             "head_dim": dim, "head_dim_v": dim, "causal": causal}
    calls, o, lse = peers(q, k, v, d_o, causal)
    right = gold(q, k, v, d_o, causal)
    for schedule, kept in [(s, kept) for s in schedules for kept in (True, False) if residual in ("both", "kept" if kept else "summed")]:
        dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
        options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
        name = f"tessera {schedule}" + ("" if kept else " summed")
        try:
            forward = kept and with_residual(lib, shape, options, q, k, v) or dict(o=o, lse=lse)
            call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, dq=dq, dk=dk, dv=dv, **forward))
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:  # refused, or no memory for its workspace
            lines = str(error).splitlines()
            reason = next((line for line in lines if f"cuda.{schedule}." in line), lines[0])
            print(f"{name}, {shape}: {reason.strip()}", file=sys.stderr)
            continue
        if "o_residual" in forward: call.notes = {"features": "residual of O"}  # of its Record
        call()
        check(name, right, dq, dk, dv)
        calls[name] = call
    return calls
