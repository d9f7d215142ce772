# SPDX-License-Identifier: Apache-2.0
"""Two small calls, for compute-sanitizer: one.py LIB FOLDER NAME."""
import ctypes, os, sys
import torch
import abi
lib = abi.Library(sys.argv[1])
for dim, hq, hk, n, causal in [(128, 2, 1, 300, 1), (64, 2, 2, 333, 1), (256, 1, 1, 150, 1), (64, 1, 1, 256, 0)]:
    os.environ["TESSERA_VARIANT"] = f"{sys.argv[2]}/{sys.argv[3]}{dim}.so"
    make = lambda h: torch.ones(1, n, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v, d_o = make(hq), make(hk), make(hk), make(hq)
    shape = {"dtype": 3, "batch": 1, "len_q": n, "len_kv": n, "heads_q": hq, "heads_kv": hk, "head_dim": dim, "head_dim_v": dim, "causal": causal}
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES["fa2"])
    o = torch.ones_like(q); lse = torch.zeros(1, hq, n, device="cuda")
    grads = [torch.empty_like(t) for t in (q, k, v)]
    lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, o=o, lse=lse, dq=grads[0], dk=grads[1], dv=grads[2]))()
    torch.cuda.synchronize(); print("done", dim, n, causal, flush=True)
