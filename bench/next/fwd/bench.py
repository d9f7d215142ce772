#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Variants of fa3's forward (build.sh) beside cuDNN, in one process: cold L2, calls in a new order each time, medians.

    python3 bench.py plan.json OUT_FOLDER

Each result is compared with PyTorch's in fp32 at one head, and bit by bit with the first variant of its row.
"""
import ctypes, json, math, os, random, statistics, sys, time
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
HERE = os.path.dirname(os.path.abspath(__file__))
T0 = time.time()
plan = json.load(open(sys.argv[1]))          # {"budget": s, "repeat": n, "rows": [...], ...}
OUT = sys.argv[2]
libs = {}
def lib(name):
    if name not in libs:
        l = ctypes.CDLL(f"{HERE}/so/{name}.so")
        l.fwd.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 5 + [ctypes.c_long] + [ctypes.c_int] * 5 + [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        if hasattr(l, 'floor_of'): l.floor_of.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
        if hasattr(l, 'set_stamps'): l.set_stamps.argtypes = [ctypes.c_void_p]
        libs[name] = l
    return libs[name]
flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
counter = torch.zeros(64, dtype=torch.int32, device="cuda")
STREAM = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
def make(row):
    dim, batch, hq, hkv, lq, lkv = (row[k] for k in ("dim", "batch", "hq", "hkv", "lq", "lkv"))
    g = torch.Generator(device="cuda"); g.manual_seed(1)
    rnd = lambda l, h: torch.randn(batch, l, h, dim, device="cuda", dtype=torch.bfloat16, generator=g)
    return rnd(lq, hq), rnd(lkv, hkv), rnd(lkv, hkv)
def caller(variant, row, t):
    # variant: {"so":..., "shape":..., "together":..., "one_head":...}
    l = lib(variant["so"]); q, k, v = t
    o = torch.zeros_like(q); lse = torch.zeros(row["batch"], row["hq"], row["lq"], device="cuda")
    hkv = 1 if variant.get("one_head") else row["hkv"]
    a = [variant["shape"], q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), row["batch"], row["hq"], hkv, row["lq"], row["lkv"], row["causal"], row.get("window", -1), variant.get("shift", 0), counter.data_ptr(), STREAM, variant.get("together", 0)]
    def call():
        e = l.fwd(*a)
        if e: raise SystemExit(f"{variant} failed {e}")
    return call, o, lse
def reference(row, t):
    q, k, v = (x.transpose(1, 2) for x in t)
    b = row["batch"] - 1
    q, k, v = q[b:, -1:].float(), k[b:, -1:].float(), v[b:, -1:].float()
    n = min(1024, row["lq"]); s = (q[:, :, -n:] @ k.transpose(-1, -2)) / math.sqrt(row["dim"])
    if row["causal"]:
        i = torch.arange(row["lq"] - n, row["lq"], device="cuda")[:, None] + row["lkv"] - row["lq"]; j = torch.arange(row["lkv"], device="cuda")[None]
        hide = j > i
        if row.get("window", -1) >= 0: hide |= j < i - row["window"]
        s = s.masked_fill(hide, -math.inf)
    return n, torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
# stamps
for s in plan.get("stamps", []):
    if time.time() - T0 > plan["budget"]: break
    t = make(s); l = lib(s["so"])
    buf = torch.zeros(132 * 4 * 512, dtype=torch.int32, device="cuda")
    l.set_stamps(None)
    call, o, lse = caller({"so": s["so"], "shape": s["shape"], "together": s.get("together", 0)}, s, t)
    for _ in range(3): call()
    flush.zero_(); torch.cuda.synchronize()
    l.set_stamps(buf.data_ptr()); call(); torch.cuda.synchronize(); l.set_stamps(None)
    d = buf.cpu().numpy().astype("uint32").reshape(132, 4, 512)
    import numpy as np
    np.save(OUT + f"/stamps_{s['name']}.npy", d[[0, 1, 40, 77, 131]])
results = []
for row in plan["rows"]:
    if time.time() - T0 > plan["budget"]: print("out of time"); break
    t = make(row); calls = {}; bad = []
    n, ro, rl = reference(row, t)
    outs = {}; primes = {}
    for name, variant in row["variants"].items():
        call, o, lse = caller(variant, row, t)
        call(); torch.cuda.synchronize()
        eo = ((o[-1, -n:, -1].float() - ro[0, 0]).norm() / ro.norm()).item(); el = (lse[-1, -1, -n:] - rl[0, 0]).abs().max().item()
        outs[name] = (o, lse)
        if not variant.get("wrong"):
            if not (eo < 5e-3 and el < 1e-3): bad.append(f"{name}: WRONG O {eo:.2e} LSE {el:.2e}")
            first = next(iter(outs))
            if not (torch.equal(outs[first][0], o) and torch.equal(outs[first][1], lse)): bad.append(f"{name}: bits differ from {first}")
        calls[name] = call
        if variant.get("prime"):
            small = dict(name="p", dim=row["dim"], batch=132, hq=1, hkv=1, lq=128, lkv=128, causal=row["causal"])
            primes[name], keep1, keep2 = caller(variant, small, make(small)); outs[name + "p"] = (keep1, keep2, primes[name])
    qs = [x.transpose(1, 2) for x in t]
    if row.get("peers", 1) and row.get("window", -1) < 0:
        def sd(backend, qs=qs, row=row):
            with sdpa_kernel(backend): return F.scaled_dot_product_attention(*qs, is_causal=bool(row["causal"]), enable_gqa=row["hq"] != row["hkv"])
        calls["cudnn"] = lambda: sd(SDPBackend.CUDNN_ATTENTION)
        if row.get("fa2"): calls["fa2"] = lambda: sd(SDPBackend.FLASH_ATTENTION)
    if row.get("floor"):
        l = lib(row["floor"]); o = torch.empty_like(t[0])
        calls["floor"] = lambda: l.floor_of(t[0].data_ptr(), t[1].data_ptr(), t[2].data_ptr(), o.data_ptr(), t[0].numel() * 2, t[1].numel() * 2, STREAM)
    times = {k: [] for k in calls}
    for c in calls.values():
        try: c(); torch.cuda.synchronize()
        except Exception as e: print("call failed", e)
    for _ in range(row.get("repeat", plan["repeat"])):
        names = list(calls); random.shuffle(names)
        for k in names:
            b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); primes.get(k, int)(); b.record(); calls[k](); e.record(); e.synchronize(); times[k].append(b.elapsed_time(e) * 1e3)
    med = {k: round(statistics.median(x), 1) for k, x in times.items()}
    print(row["name"], " ".join(f"{k} {v}" for k, v in med.items()), "|", "; ".join(bad), flush=True)
    results.append({"row": row["name"], "us": med, "min": {k: round(min(x), 1) for k, x in times.items()}, "bad": bad})
    json.dump(results, open(OUT + "/bench.json", "w"))
print("seconds", round(time.time() - T0, 1))
