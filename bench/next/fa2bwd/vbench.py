# SPDX-License-Identifier: Apache-2.0
"""Variants of fa2's backward kernel and PyTorch's in one process: time, difference from the first, bits over 5 runs. vbench.py LIB FOLDER NAME,NAME SECONDS, LIB with backward_kernels_hook.cc, FOLDER/NAME{64,128,256}.so"""
import ctypes, math, os, statistics, sys, time
t0 = time.time()
import torch
import abi, torch_backward as tb
LIMIT = float(sys.argv[4]) if len(sys.argv) > 4 else 60
lib = abi.Library(sys.argv[1]); folder = sys.argv[2]; names = sys.argv[3].split(",")
def path(n, dim):
    os.environ["TESSERA_PARTS"] = "0" if n.endswith("-") else "1"
    n = n.rstrip("-")
    if n == "main": return ""
    p = f"{folder}/{n}{64 if dim <= 64 else 128 if dim <= 128 else 256}.so"
    return p if os.path.exists(p) else None
# dim, heads_q, heads_kv, causal, batch, len
ROWS = [(128, 16, 16, 0, 4, 4096), (64, 32, 32, 0, 4, 4096), (128, 16, 16, 1, 4, 4096), (64, 32, 32, 1, 4, 4096),
        (256, 8, 8, 0, 4, 4096), (256, 8, 8, 1, 4, 4096), (128, 16, 16, 1, 16, 1024), (64, 32, 32, 0, 32, 512), (64, 32, 32, 1, 32, 512),(128, 16, 16, 0, 32, 512), (128, 16, 16, 1, 32, 512),
        (128, 3, 3, 1, 2, 1001), (64, 3, 3, 1, 2, 1001), (64, 4, 2, 0, 2, 77), (128, 4, 2, 0, 2, 333), (256, 2, 2, 1, 1, 517), (96, 4, 4, 1, 2, 1500), (128, 8, 2, 1, 2, 700),
        (128, 16, 16, 0, 1, 16384), (128, 16, 16, 1, 1, 16384), (64, 32, 32, 1, 1, 16384), (128, 64, 8, 1, 2, 4096), (128, 64, 8, 0, 2, 4096), (64, 32, 32, 1, 16, 1024), (256, 8, 8, 1, 32, 512), (256, 8, 8, 1, 1, 16384)]
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
def timed(call, n):
    out = []
    for _ in range(n):
        flush.zero_()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); call(); b.record(); torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    return statistics.median(out)
def fa2(q, k, v, d_o, causal):
    aten = torch.ops.aten
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    o, lse, cq, ck, mq, mk, seed, off = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:8]
    return lambda: aten._scaled_dot_product_flash_attention_backward(d_o, q, k, v, o, lse, cq, ck, mq, mk, 0.0, causal, seed, off)
torch.manual_seed(7)
ratios = {}
for row in ROWS:
    if time.time() - t0 > LIMIT: print("time is up"); break
    dim, hq, hk, causal, batch, n = row
    make = lambda h: torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v, d_o = make(hq), make(hk), make(hk), make(hq)
    shape = {"dtype": 3, "batch": batch, "len_q": n, "len_kv": n, "heads_q": hq, "heads_kv": hk, "head_dim": dim, "head_dim_v": dim, "causal": causal}
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES["fa2"])
    os.environ["TESSERA_VARIANT"] = ""
    kept = tb.with_rest(lib, shape, options, q, k, v)
    grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
    call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, dq=grads[0], dk=grads[1], dv=grads[2], **kept))
    right = tb.gold(q, k, v, d_o, causal)
    flop = 10.0 * batch * hq * n * n * dim * (0.5 if causal else 1)
    line = f"{row}"
    big = n * n * batch * hq > 3e7
    if big:
        peer_call = fa2(q, k, v, d_o, bool(causal))
        for _ in range(2): peer_call()
        peer = timed(peer_call, 7)
        line += f" torch {flop / peer / 1e9:.0f}"
    base = None
    for name in names:
        p = path(name, dim)
        if p is None: continue
        os.environ["TESSERA_VARIANT"] = p
        for g in grads: g.fill_(math.nan)
        call(); torch.cuda.synchronize()
        got = [g.clone() for g in grads]
        notes = ""
        if base is None: base = got
        else:
            err = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, base)]
            if not max(err) < 3e-3: notes += " OFF" + "/".join(f"{e:.1e}" for e in err)
            if all(torch.equal(a, b) for a, b in zip(got, base)): notes += "="
        for w, g, e in zip("qkv", got, right):
            x = ((g[0, -1, -e.shape[0]:].float() - e).norm() / e.norm()).item()
            if not x < 1e-2: notes += f" WRONG d{w} {x:.1e}"
        for _ in range(4):
            call()
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(got, grads)): notes += " NONDET"; break
        if big:
            t = timed(call, 7)
            ratios.setdefault(name, []).append(peer / t)
            line += f" | {name} {flop / t / 1e9:.0f} ({peer / t:.2f}){notes}"
        else: line += f" | {name}{notes or ' ok'}"
    print(line, flush=True)
    kept = call = grads = base = got = peer_call = None
for name, r in ratios.items(): print(name, len(r), "rows, geometric mean", f"{math.exp(sum(map(math.log, r)) / len(r)):.3f}")
