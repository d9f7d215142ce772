#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The backward in fp16 and bf16: libraries and peers call by call in turn in one process, TFLOP/s, medians, cold L2.

    python3 bench/next/fa3bwd/times.py new=build/src/libtessera.so,before=other/libtessera.so SECONDS

"new f": fp16 with the rest of O; "sum f": without; "t.fa2": tessera's fa2; "T.fa2": PyTorch's. The bits of every library are
compared with those of "new". Rows with k also say what each kernel took, and the gaps between them."""
import ctypes
import math
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "compare"))
import abi
from torch_backward import check, gold, peers, with_rest

# head_dim, heads_q, heads_kv, causal, batch, length, what: p peers, s without the rest, 2 tessera's fa2, k by kernel
ROWS = [(128, 16, 16, 0, 32, 512, "pk"), (64, 32, 32, 0, 32, 512, "pk"), (128, 16, 16, 1, 1, 16384, "ps2"),
        (64, 32, 32, 1, 1, 16384, "ps2"), (256, 8, 8, 1, 4, 4096, "psk"), (128, 16, 16, 1, 32, 512, "p"),
        (64, 32, 32, 1, 32, 512, "p"), (256, 8, 8, 0, 32, 512, "p"), (128, 16, 16, 0, 4, 4096, "ps"),
        (64, 32, 32, 0, 4, 4096, "ps"), (128, 64, 8, 1, 1, 8192, "p"), (192, 8, 8, 1, 4, 4096, "p"),
        (256, 8, 8, 1, 1, 16384, "p"), (128, 16, 16, 1, 4, 4096, "p"), (128, 16, 16, 1, 2, 8192, "p"),
        (64, 32, 32, 1, 4, 4096, "p"), (128, 16, 16, 0, 1, 16384, "p"), (64, 32, 32, 0, 1, 16384, "p")]
libs, seconds = dict(a.split("=") for a in sys.argv[1].split(",")), float(sys.argv[2])
end = time.time() + seconds
flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
L = {n: abi.Library(p) for n, p in libs.items()}


def fa3(lib, shape, q, k, v, d_o, o, lse, right, name, kept, schedule="fa3"):
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
    dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
    f = dict(o=o, lse=lse)
    if kept: f = with_rest(lib, shape, options, q, k, v) or f
    call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, dq=dq, dk=dk, dv=dv, **f))
    call(); check(name, right, dq, dk, dv)
    return call, (dq, dk, dv), "o_rest" in f


for dim, hq, hkv, causal, batch, length, what in ROWS:
    if time.time() > end: print("out of time"); break
    torch.cuda.empty_cache()
    calls, bits = {}, {}
    for dtype, short in ((torch.float16, "f"), (torch.bfloat16, "b")):
        torch.manual_seed(0)
        make = lambda heads: torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
        q, k, v, d_o = make(hq), make(hkv), make(hkv), make(hq)
        shape = {"dtype": abi.DTYPES[dtype], "batch": batch, "len_q": length, "len_kv": length, "heads_q": hq, "heads_kv": hkv,
                 "head_dim": dim, "head_dim_v": dim, "causal": causal}
        p, o, lse = peers(q, k, v, d_o, causal)
        right = gold(q, k, v, d_o, causal)
        if short == "f" and "p" in what: calls["T.fa2 f"], calls["cudnn f"] = p["fa2"], p["cudnn"]
        for n, lib in L.items():
            try:
                calls[f"{n} {short}"], out, used = fa3(lib, shape, q, k, v, d_o, o, lse, right, f"{n} {short}", True)
                if short == "f":
                    bits[n] = [t.clone() for t in out]
                    if not used: print(n, "without rest")
                if "s" in what and n == "new": calls[f"sum {short}"] = fa3(lib, shape, q, k, v, d_o, o, lse, right, f"sum {short}", False)[0]
            except RuntimeError as e: print(n, short, str(e)[:300])
        if "2" in what and short == "f": calls["t.fa2 f"] = fa3(L["new"], shape, q, k, v, d_o, o, lse, right, "fa2", False, "fa2")[0]
    for n in bits:
        if n != "new": print("same bits" if all(torch.equal(a, b) for a, b in zip(bits[n], bits["new"])) else "OTHER BITS", n)
    times = {n: [] for n in calls}
    for c in calls.values(): c()
    for _ in range(9):
        for n, c in calls.items():
            b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); b.record(); c(); e.record(); e.synchronize(); times[n].append(b.elapsed_time(e))
    pairs = length * (length + 1) // 2 if causal else length * length
    flop = 10 * batch * hq * dim * pairs
    print(dim, f"{hq}/{hkv}", "causal" if causal else "full", f"{batch}x{length}", " | ".join(f"{n} {flop / statistics.median(t) * 1e-9:.0f} ({statistics.median(t) * 1e3:.0f} us)" for n, t in times.items()), flush=True)
    if "k" in what:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            for n, c in calls.items():
                if n.startswith("T.") or n.startswith("cudnn"): continue
                flush.zero_(); c()
            torch.cuda.synchronize()
        ev = sorted((e for e in prof.events() if str(e.device_type).endswith("CUDA")), key=lambda e: e.time_range.start)
        last = None
        for e in ev:
            name = e.name
            for s in ("delta_of_output", "delta_kernel", "dq_product", "dq_kernel", "backward_kernel", "Memset", "memset"):
                if s in name: name = s; break
            else: name = name[:24]
            half = "half" if "__half" in e.name else ""
            gap = 0 if last is None else e.time_range.start - last
            print(f"    {name} {half} {e.time_range.elapsed_us():.1f} us, gap {gap:.1f}")
            last = e.time_range.end
