# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of attention in bf16 on a GPU: with the residual of O, without it, and by PyTorch's kernels.

    python python/bench/training.py [--json]

Milliseconds of both passes by CUDA events, the least of 4 runs of 12 calls; the three take turns in one process.
`gain` is the time without the residual of O (docs/numerics.md) divided by that with it; `of flash` and `of cudnn` are
PyTorch's times, by the kernel named, divided by ours.
"""
import argparse
import json

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera.torch
from tessera.torch import _operators

RUNS, CALLS = 4, 12
SIZES = [  # batch, len, heads_q, heads_kv, head_dim, causal
    (1, 128, 4, 4, 64, True), (8, 128, 16, 16, 128, True), (8, 512, 16, 16, 128, True), (4, 2048, 16, 16, 128, True),
    (2, 4096, 16, 16, 64, True), (2, 4096, 16, 16, 128, True), (2, 4096, 16, 4, 128, True),
    (2, 4096, 16, 16, 128, False),
    (1, 16384, 16, 16, 128, True)]


def milliseconds(function):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def functions(batch, length, heads_q, heads_kv, head_dim, causal):
    """Name -> a function that runs both passes."""
    def tensor(heads):
        return torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = tensor(heads_q), tensor(heads_kv), tensor(heads_kv)
    d_o = torch.randn_like(q)
    turned = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]

    def ours(keeps):
        was, _operators.keeps_residual = _operators.keeps_residual, lambda *_: keeps
        o = tessera.torch.attention(q, k, v, causal="bottom-right" if causal else None)
        _operators.keeps_residual = was
        torch.autograd.grad(o, (q, k, v), d_o)

    def pytorch(backend):
        with sdpa_kernel(backend):
            o = functional.scaled_dot_product_attention(*turned, is_causal=causal, enable_gqa=heads_q != heads_kv)
        torch.autograd.grad(o, turned, d_o.transpose(1, 2))
    return {"with": lambda: ours(True), "without": lambda: ours(False),
            "flash": lambda: pytorch(SDPBackend.FLASH_ATTENTION), "cudnn": lambda: pytorch(SDPBackend.CUDNN_ATTENTION)}


def measure(size):
    found = functions(*size)
    least = {}
    for _ in range(RUNS + 1):  # the first run is a warm-up
        for name, function in found.items():
            least[name] = min(least.get(name, float("inf")), milliseconds(function))
    return dict(size=size, ms=round(least["with"], 3), gain=round(least["without"] / least["with"], 2),
                of_flash=round(least["flash"] / least["with"], 2), of_cudnn=round(least["cudnn"] / least["with"], 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    results = [measure(size) for size in SIZES]
    if options.json:
        print(json.dumps(dict(torch=torch.__version__, device=torch.cuda.get_device_name(), rows=results)))
        return
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, bf16, both passes")
    print(f"{'batch, len, heads_q, heads_kv, head_dim, causal':<48}"
          f"{'ms':>8}{'gain':>8}{'of flash':>10}{'of cudnn':>10}")
    for r in results:
        size = ", ".join(map(str, r["size"]))
        print(f"{size:<48}{r['ms']:8.3f}{r['gain']:8.2f}{r['of_flash']:10.2f}{r['of_cudnn']:10.2f}")


if __name__ == "__main__":
    main()
