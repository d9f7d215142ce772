# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: which bits are those of one process, and errors beside fp64."""
import torch

import torch_reference as reference
from context_parallel_support import (NAMES, case, expect, inputs, one_process, ranks_part, reversed_chunks, rows_of)

OPTIONS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (20, 0)},
    "two-sided window": {"window": (20, 9)},
    "window to the right": {"window": (None, 5)},
    "softcap": {"causal": True, "softcap": 5.0, "scale": 0.3},
    "documents": {"causal": True, "cu_seqlens": [0, 13, 50, 50, 61, 96]},
    "documents without a mask": {"cu_seqlens": [0, 13, 50, 61, 90]},
    "documents with a window": {"window": (11, 6), "cu_seqlens": [0, 37, 96]},
}


@case
def bits_of_one_process(groups):
    """By a kernel whose dQ adds keys in one order, O, LSE and dQ have the bits of one process, and dK and dV those of a
    fixed order of partial sums."""
    for name, options in OPTIONS.items():
        options = {**options, "kernel": "cpu.fa1"}
        whole = inputs()
        d_lse = reference.random((1, 4, 96), 9)
        want = one_process(*whole, options, d_lse)
        for ranks, group in groups.items():
            for order in ("zigzag", "contiguous", reversed_chunks(ranks)):
                what = f"{name}, {ranks} ranks, {order if isinstance(order, str) else 'permutation'}"
                got = ranks_part(whole, group, order, options, d_lse)
                expect(got, rows_of(want, group, order), ("o", "lse", "dq"), 1e-6, what)


@case
def bits_by_the_planned_kernel(groups):
    """O and LSE by the kernel that the plan chooses, in 16 bits too; heads in groups; batches; odd sizes."""
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        for sizes in (dict(batch=2), dict(total=480, head_dim=64), dict(heads_q=6, heads_kv=3, head_dim=20),
                      dict(heads_q=8, heads_kv=1)):
            whole = inputs(dtype=dtype, **sizes)
            want = one_process(*whole, {"causal": True})
            for ranks, group in groups.items():
                for order in ("zigzag", "contiguous"):
                    got = ranks_part(whole, group, order, {"causal": True}, steps=2)
                    expect(got, rows_of(want, group, order), ("o", "lse"), limit, f"{dtype}, {sizes}, {ranks}, {order}")


@case
def gradients_on_any_number_of_ranks(groups):
    """With gradient_blocks all gradients have the same bits for 1, 2, 3 and 4 ranks, any order and any steps."""
    for name in ("causal", "full", "documents", "two-sided window"):
        for dtype in (torch.float32, torch.bfloat16):
            whole, options = inputs(dtype=dtype), OPTIONS[name]
            want = None
            for ranks, group in groups.items():
                blocks = torch.arange(96).view(24, 4).flip(0).flatten()
                for order in ("zigzag", "contiguous", blocks):
                    got = ranks_part(whole, group, order, options, gradient_blocks=24, steps=ranks % 2 + 1)
                    want = want or got  # of a group of one, whose rows are in the order of the sequence
                    expect(got, rows_of(want, group, order), NAMES, 0, f"{name}, {dtype}, {ranks} ranks")


@case
def exact_to_rounding(groups):
    """All results beside fp64, and inputs in fp64."""
    for name, options in OPTIONS.items():
        if "cu_seqlens" in options:
            continue
        q, k, v, d_o = whole = inputs()
        q64, k64, v64 = (t.double().requires_grad_() for t in (q, k, v))
        plain = {**options, "causal": "bottom-right" if options.get("causal") else None}
        if plain["causal"] and plain.get("window"):
            plain["window"] = (plain["window"][0], 0)
        o, lse = reference.attention(q64, k64, v64, **plain)
        want = (o.detach(), lse.detach(), *torch.autograd.grad(o, (q64, k64, v64), d_o.double()))
        for ranks, group in groups.items():
            got = ranks_part(whole, group, "zigzag", options)
            for part, g, w in zip(NAMES, got, rows_of(want, group, "zigzag")):
                reference.expect_close(g, w, 2e-6, f"{name}, {ranks} ranks: {part}")
            doubles = [t.double() for t in whole]
            got = ranks_part(doubles, group, "zigzag", options)
            for part, g, w in zip(NAMES, got, rows_of(want, group, "zigzag")):
                reference.expect_close(g, w, 1e-12, f"{name} in fp64, {ranks} ranks: {part}")
