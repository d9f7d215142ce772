"""microseconds on the host for pieces of a call; argument: where tessera lies"""
import sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.nn.functional as F
import tessera.torch as tt
from tessera.torch import _operators, _fused, _attention
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 1, 1, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
s = _fused.settings(0, False, None, -1, -1, 2**30)
noop = getattr(torch.ops.tessera, "noop", None)
fs = dict(relu_op=lambda: torch.ops.aten.relu_.default._op(q), relu_b=lambda: torch.relu_(q), empty_like_op=lambda: torch.ops.aten.empty_like.default._op(q),
          empty=lambda: torch.empty(1, 1, 1, 8, device="cuda"), bare=lambda: _operators._plain_o(q, k, v), plain2=lambda: _operators._plain(q, k, v), att=lambda: tt.attention(q, k, v),
          fused=lambda: _fused.op(*leaves, s), fused_nograd=lambda: _fused.op(q, k, v, s), grad=lambda: tt.attention(*leaves),
          sdpa=lambda: F.scaled_dot_product_attention(q, k, v), sdpa_grad=lambda: F.scaled_dot_product_attention(*leaves),
          takes=lambda: _fused.takes(*leaves), settings=lambda: _fused.settings(0, False, None, -1, -1, 2**30),
          compiling=_attention._is_compiling, functorch=_attention._functorch_active, fwd=_attention._forward_mode, modes=_fused._modes, hooks=lambda: _fused._hooks(False), gradon=_attention._is_grad_enabled, rg=lambda: q.requires_grad, iscuda=lambda: q.is_cuda, nothing=lambda: None)
if noop is not None:
    n = noop.default._op
    fs["noop3"] = lambda: n(q, k, v)
    fs["noop5"] = lambda: n(q, k, v, 0, False)
best = {}
for r in range(40):
    for name, f in fs.items():
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(50): f()
        h = time.perf_counter()
        torch.cuda.synchronize()
        e = time.perf_counter()
        a, b = best.get(name, (9e9, 9e9))
        best[name] = min(a, (h - t) * 2e4), min(b, (e - t) * 2e4)
print("host us (with sync):", ", ".join(f"{n} {a:.2f} ({b:.2f})" for n, (a, b) in best.items()), flush=True)
for _ in range(4000): fs["bare"]()
torch.cuda.synchronize()
