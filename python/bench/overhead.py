# SPDX-License-Identifier: Apache-2.0
"""The time of a call on the host beside its arithmetic, with PyTorch's own attention for comparison.

    python python/bench/overhead.py [--device cpu] [--json]

Each row calls attention on tensors [1, 1, 1, 8], fp32 on the CPU and bf16 on CUDA, which leaves nothing to compute. A
figure is microseconds for one call, the least of 150 runs; the rows take turns, so that other work on the machine hits
all alike. `of SDPA` is the ratio to PyTorch's scaled_dot_product_attention in the same mode and run.
"""
import argparse
import json
import time

import torch
import torch.nn.functional as functional

import tessera.flash_attn
import tessera.torch
from tessera.torch import _operators

RUNS, CALLS = 150, 50


def rows(device):
    """(mode, name, function): all functions of a mode compute the same."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 1, 1, 8, device=device, dtype=dtype) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    functions = [("torch SDPA", functional.scaled_dot_product_attention),
                 ("tessera.torch.attention", tessera.torch.attention),
                 ("tessera.torch.scaled_dot_product_attention", tessera.torch.scaled_dot_product_attention),
                 ("tessera.flash_attn.flash_attn_func", tessera.flash_attn.flash_attn_func)]
    found = [("forward", name, lambda f=f: f(q, k, v)) for name, f in functions]
    every = _operators.Arguments(q, k, v)
    found.insert(1, ("forward", "the operator tessera::forward_o", lambda: _operators.forward_o(q, k, v)))
    found.insert(2, ("forward", "the operator tessera::forward", lambda: _operators.forward(*every)))
    found.insert(1, ("forward", "torch.relu_: one kernel, nothing else", lambda: torch.relu_(q)))
    found.insert(2, ("forward", "two torch.empty", lambda: (torch.empty(1, 1, 1, 8, device=device),
                                                            torch.empty(1, 1, 1, device=device))))
    found += [("forward with grad", name, lambda f=f: f(*leaves)) for name, f in functions]
    ones = torch.ones_like(q)
    found += [("forward and backward", name, lambda f=f: torch.autograd.grad(f(*leaves), leaves, ones))
              for name, f in functions]
    return found


def microseconds(function, synchronize):
    synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        function()
    synchronize()
    return (time.perf_counter() - begun) / CALLS * 1e6


def measure(device):
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    found = rows(device)
    least = [float("inf")] * len(found)
    for _ in range(RUNS):
        for i, (_, _, function) in enumerate(found):
            least[i] = min(least[i], microseconds(function, synchronize))
    base = {mode: us for (mode, name, _), us in zip(found, least) if name == "torch SDPA"}
    return [dict(mode=mode, name=name, microseconds=round(us, 2), of_sdpa=round(us / base[mode], 2))
            for (mode, name, _), us in zip(found, least)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.device)
    if options.json:
        print(json.dumps(dict(torch=torch.__version__, device=options.device, rows=results)))
        return
    print(f"PyTorch {torch.__version__}, {options.device}, 1 thread; microseconds a call")
    for mode in dict.fromkeys(r["mode"] for r in results):
        print(f"\n{mode:<46}{'us':>8}{'of SDPA':>10}")
        for r in results:
            if r["mode"] == mode:
                print(f"  {r['name']:<44}{r['microseconds']:8.1f}{r['of_sdpa']:10.2f}")


if __name__ == "__main__":
    main()
