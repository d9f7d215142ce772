import ctypes, math, os, sys
import torch
import abi, torch_backward as tb
lib = abi.Library(sys.argv[1]); folder = sys.argv[2]; names = sys.argv[3].split(","); dim = int(sys.argv[4])
heads, batch, n = 2048 // dim, 4, 4096
make = lambda h: torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
q, k, v, d_o = make(heads), make(heads), make(heads), make(heads)
shape = {"dtype": 3, "batch": batch, "len_q": n, "len_kv": n, "heads_q": heads, "heads_kv": heads, "head_dim": dim, "head_dim_v": dim}
options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES["fa2"])
kept = tb.with_rest(lib, shape, options, q, k, v)
dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
call = lib.prepare(shape, options, abi.BACKWARD, dict(q=q, k=k, v=v, d_o=d_o, dq=dq, dk=dk, dv=dv, **kept))
aten = torch.ops.aten
o, lse, cq, ck, mq, mk, seed, off = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False)[:8]
aten._scaled_dot_product_flash_attention_backward(d_o, q, k, v, o, lse, cq, ck, mq, mk, 0.0, False, seed, off)
for name in names:
    os.environ["TESSERA_VARIANT"] = "" if name == "main" else f"{folder}/{name}{dim}.so"
    call()
torch.cuda.synchronize()
