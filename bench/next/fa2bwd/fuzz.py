# SPDX-License-Identifier: Apache-2.0
"""Random calls of a variant beside the library's own kernel: fuzz.py LIB FOLDER NAME SECONDS SEED."""
import ctypes, math, os, random, sys, time
t0 = time.time()
import torch
import abi
lib = abi.Library(sys.argv[1]); folder, name, limit, seed = sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5])
r = random.Random(seed); torch.manual_seed(seed)
count = bad = 0
while time.time() - t0 < limit:
    dim = r.choice([64, 64, 64, 128, 128, 256, 40, 80, 96, 192, 16])
    dim_v = dim if r.random() < 0.8 else r.choice([64, 128, 32, 72])
    if max(dim, dim_v) <= 64: cls = 64
    elif max(dim, dim_v) <= 128: cls = 128
    else: cls = 256
    path = f"{folder}/{name}{cls}.so"
    if not os.path.exists(path): continue
    hk = r.choice([1, 1, 2, 3, 8, 32]); group = r.choice([1, 1, 2, 3, 8]) if hk <= 3 else 1
    batch = r.choice([1, 1, 2, 3])
    n = r.choice([r.randint(1, 200), r.randint(200, 700), 64 * r.randint(1, 20), r.randint(700, 2200), 4096 if hk >= 8 else 512])
    m = n if r.random() < 0.6 else r.randint(1, 1500)
    if n * m * batch * hk * group > 6e8: batch = 1
    causal = r.choice([0, 1, 1, 2]); window = r.random() < 0.2
    make = lambda h, l, d: (torch.randn(batch, l, h, d, device="cuda", dtype=torch.bfloat16) * r.choice([1, 1, 1, 3])).transpose(1, 2)
    q, k, v, d_o = make(hk * group, n, dim), make(hk, m, dim), make(hk, m, dim_v), make(hk * group, n, dim_v)
    hidden = r.random() < 0.25 and causal
    if hidden:
        what = r.randint(1, 15)
        if what & 1: k[:, :, -1, 0] = math.nan
        if what & 2: v[:, :, -1, 1] = math.inf
        if what & 4: q[:, :, 0, 2] = math.nan
        if what & 8: d_o[:, :, 0, 3] = math.inf
    shape = {"dtype": 3, "batch": batch, "len_q": n, "len_kv": m, "heads_q": hk * group, "heads_kv": hk, "head_dim": dim, "head_dim_v": dim_v, "causal": causal}
    if window: shape |= {"window_left": r.randint(0, 300), "window_right": r.randint(0, 200)}
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES["fa2"])
    o = torch.empty(batch, n, hk * group, dim_v, device="cuda", dtype=torch.bfloat16).transpose(1, 2); lse = torch.empty(batch, hk * group, n, device="cuda")
    grads = dict(dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
    for g in list(grads):
        if r.random() < 0.08 and len(grads) > 1: del grads[g]
    try:
        lib.prepare(shape, options, abi.FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))()
        call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, o=o, lse=lse, **grads))
    except RuntimeError as e:
        print("refused", shape, str(e)[:200]); continue
    def run(p):
        os.environ["TESSERA_VARIANT"] = p
        for g in grads.values(): g.fill_(7)
        call(); torch.cuda.synchronize()
        return {n: g.float() if False else g.clone() for n, g in grads.items()}
    right, got = run(""), run(path)
    notes = []
    for g in grads:
        a, b = got[g].float(), right[g].float()
        fa, fb = torch.isfinite(a), torch.isfinite(b)
        if not torch.equal(fa, fb): notes.append(f"{g}: finite {int(fa.sum())} of {int(fb.sum())}"); continue
        a, b = a[fa], b[fb]
        error = ((a - b).norm() / b.norm().clamp_min(1e-20)).item() if a.numel() else 0
        if not error < 4e-3: notes.append(f"{g}: {error:.1e}")
    for _ in range(2):
        again = run(path)
        if not all(torch.equal(again[g].view(torch.int16), got[g].view(torch.int16)) for g in grads): notes.append("bits differ"); break
    count += 1
    if notes: bad += 1; print("BAD", shape, "hidden" if hidden else "", list(grads), notes, flush=True)
print(name, "seed", seed, count, "calls", bad, "bad")
