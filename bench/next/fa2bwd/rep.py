# SPDX-License-Identifier: Apache-2.0
"""Repeats of calls, bit by bit, beside others: rep.py LIB FOLDER NAME COUNT."""
import ctypes, os, sys, time
t0 = time.time()
import torch
import abi
lib = abi.Library(sys.argv[1]); folder, name, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.manual_seed(1)
noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16); other = torch.cuda.Stream()
for dim, hq, hk, causal, batch, n in [(128, 16, 16, 1, 2, 2048), (64, 32, 32, 1, 2, 2048), (256, 8, 8, 1, 1, 2048), (128, 16, 4, 1, 2, 1000), (64, 8, 8, 0, 3, 777), (128, 8, 8, 0, 2, 1024), (256, 4, 4, 0, 2, 600), (64, 40, 40, 1, 1, 4096)]:
    os.environ["TESSERA_VARIANT"] = f"{folder}/{name}{dim}.so"
    make = lambda h: torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v, d_o = make(hq), make(hk), make(hk), make(hq)
    shape = {"dtype": 3, "batch": batch, "len_q": n, "len_kv": n, "heads_q": hq, "heads_kv": hk, "head_dim": dim, "head_dim_v": dim, "causal": causal}
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES["fa2"])
    o = torch.empty_like(q); lse = torch.empty(batch, hq, n, device="cuda")
    lib.prepare(shape, options, abi.FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))()
    grads = [torch.empty_like(t) for t in (q, k, v)]
    call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, o=o, lse=lse, dq=grads[0], dk=grads[1], dv=grads[2]))
    call(); first = [g.clone() for g in grads]; bad = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(count):
        if i % 2:
            with torch.cuda.stream(other): noise @ noise
        for g in grads: g.fill_(5)
        call()
        for a, b in zip(grads, first): bad += (a.view(torch.int16) != b.view(torch.int16)).sum()
    print(name, (dim, hq, hk, causal, batch, n), count, "repeats, numbers that differ:", int(bad), flush=True)
    if time.time() - t0 > 60: break
