#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the shapes of h200_held_out.json: other head_dims, few heads, cross lengths, windows, decoding. No constant of the
cost model is fitted on them; `tessera roofline --accuracy` judges it by them.

    python3 bench/compare/torch_held_out.py build/src/libtessera.so --out bench/results/h200/held_out.jsonl

PyTorch's FlashAttention-2 runs by its own operator, which takes windows and other lengths of queries and keys; cuDNN
where scaled_dot_product_attention can ask for the same. 1 GiB is written before each call: no operand is left in L2, and
the host is done with a short call before the GPU begins it. Calls of all kernels alternate; a figure is the median
between CUDA events. Each of tessera's results is compared with FlashAttention-2's before it is timed: O, LSE and the
gradients to 2 % of their norm, which finds a grossly wrong kernel, no more. What a kernel refuses is told on stderr and
has no Record.
"""
import argparse
import ctypes
import datetime
import json
import math
import pathlib
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
from torch_cuda import query, times_of

SHAPES = pathlib.Path(__file__).parent / "h200_held_out.json"
MOST_SCORES = 4 << 30  # elements of S for which `standard` is asked at all: 16 GiB


class Case:
    """A row of the file with its tensors, [batch, len, heads, head_dim]."""

    def __init__(self, row):
        (self.kind, self.direction, self.dim, self.heads_q, self.heads_kv, self.batch, self.len_q, self.len_kv,
         self.mask) = row
        self.causal = self.mask == "causal"
        self.window = int(self.mask.split()[1].split(",")[0]) if self.mask.startswith("window") else None
        make = lambda length, heads: torch.randn(self.batch, length, heads, self.dim, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v = make(self.len_q, self.heads_q), make(self.len_kv, self.heads_kv), make(self.len_kv, self.heads_kv)
        self.d_o = torch.randn_like(self.q)
        self.limits = {} if self.window is None else {"window_size_left": self.window, "window_size_right": 0}

    def pairs(self):
        """Visible pairs of one head: a band below the bottom-right diagonal, or all."""
        if not self.causal and self.window is None:
            return self.len_q * self.len_kv
        shift = self.len_kv - self.len_q
        left = self.len_kv if self.window is None else self.window
        return sum(max(0, min(i + shift, self.len_kv - 1) - max(0, i + shift - left) + 1) for i in range(self.len_q))

    def mask_text(self):
        return "causal bottom-right" if self.causal else self.mask

    def problem(self):
        fields = {"dtype": abi.BF16, "batch": self.batch, "len_q": self.len_q, "len_kv": self.len_kv, "heads_q": self.heads_q,
                  "heads_kv": self.heads_kv, "head_dim": self.dim, "head_dim_v": self.dim, "causal": int(self.causal)}
        if self.window is not None:
            fields.update(window_left=self.window, window_right=0)
        return fields

    def torch_heads_first(self):
        return [t.transpose(1, 2) for t in (self.q, self.k, self.v, self.d_o)]

    def cudnn_can(self):
        """What scaled_dot_product_attention says as this case does: its causal mask is aligned top-left."""
        return self.window is None and (not self.causal or self.len_q == self.len_kv)


def flash_attention(case):
    """Functions of FlashAttention-2's forward and backward; O and LSE. head_dims of 8's multiples need no padding."""
    ops, c = torch.ops.aten, case
    lengths = (None, None, c.len_q, c.len_kv, 0.0, c.causal)

    def forward():
        return ops._flash_attention_forward(c.q, c.k, c.v, *lengths, False, **c.limits)
    o, lse, random_state, unused = forward()[:4]

    def backward():
        return ops._flash_attention_backward(c.d_o, c.q, c.k, c.v, o, lse, *lengths, random_state, unused, **c.limits)
    return forward, backward, o, lse


def cudnn(case):
    q, k, v, d_o = case.torch_heads_first()
    options = {"is_causal": case.causal, "enable_gqa": case.heads_q != case.heads_kv}
    if case.direction == "forward":
        def call():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, **options)
        return call
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, **options)
    return lambda: torch.autograd.grad(out, leaves, d_o, retain_graph=True)


def differs(name, got, expected):
    error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
    return f"{name}: {error:.3g}" if not error < 2e-2 else ""


def ours(lib, case, schedule, o, lse, gradients):
    """A function that runs tessera's kernel, which has been compared with FlashAttention-2's results."""
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
    q, k, v, d_o = case.torch_heads_first()
    if case.direction == "forward":
        mine = {"o": torch.full_like(q, math.nan), "lse": torch.full_like(lse, math.nan)}
        expected = {"o": o.transpose(1, 2), "lse": lse}
        call = lib.prepare(case.problem(), options, abi.FORWARD, dict(q=q, k=k, v=v, **mine))
    else:
        mine = {"dq": torch.full_like(q, math.nan), "dk": torch.full_like(k, math.nan), "dv": torch.full_like(v, math.nan)}
        expected = {name: t.transpose(1, 2) for name, t in zip(mine, gradients)}
        call = lib.prepare(case.problem(), options, abi.BACKWARD,
                           dict(q=q, k=k, v=v, o=o.transpose(1, 2), lse=lse, d_o=d_o, **mine))
    call()
    wrong = " ".join(filter(None, (differs(name, mine[name], expected[name]) for name in mine)))
    if wrong:
        raise RuntimeError("differs from FlashAttention-2: " + wrong)
    return call


def calls_of(lib, case, schedules, with_cudnn):
    forward, backward, o, lse = flash_attention(case)
    is_forward = case.direction == "forward"
    calls = {"fa2": forward if is_forward else backward}
    gradients = None if is_forward else backward()
    candidates = {f"tessera {s}": lambda s=s: ours(lib, case, s, o, lse, gradients) for s in schedules
                  if s != "standard" or case.batch * case.heads_q * case.len_q * case.len_kv <= MOST_SCORES}
    if with_cudnn and case.cudnn_can():
        candidates["cudnn"] = lambda: cudnn(case)
    for name, prepare in candidates.items():
        try:
            call = prepare()
            call()
            calls[name] = call
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:  # refused, wrong, or no memory
            schedule = name.partition(" ")[2]
            lines = str(error).splitlines() or [""]
            reason = next((line for line in lines if f"cuda.{schedule}." in line), lines[0])
            print(f"{name}, {case.problem()} {case.direction}: {reason.strip()}", file=sys.stderr)
    return calls


def record(case, name, times, common):
    by, _, schedule = name.partition(" ")
    quarters = statistics.quantiles(times, n=4)
    flop = (4 if case.direction == "forward" else 10) * case.batch * case.heads_q * case.dim * case.pairs()
    return {"what": "measured", "by": by, "schedule": schedule or ("fa2" if by == "fa2" else ""), "pass": case.direction,
            "dtype": "bf16", "batch": case.batch, "len_q": case.len_q, "len_kv": case.len_kv, "heads_q": case.heads_q,
            "heads_kv": case.heads_kv, "head_dim": case.dim, "head_dim_v": case.dim, "mask": case.mask_text(),
            "deterministic": case.direction == "forward" or by == "tessera", "ms": quarters[1],
            "ms_spread": quarters[2] - quarters[0], "tflops": flop / quarters[1] * 1e-9, **common}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--kinds", help="comma-separated; default: all")
    parser.add_argument("--schedules", default="fa3,fa2,fa1,standard", help="tessera's, comma-separated")
    parser.add_argument("--no-cudnn", action="store_true", help="its kernels take a second each to be made")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no new shape after so many")
    parser.add_argument("--out", required=True, help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    flush = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    rows = [r for r in json.loads(SHAPES.read_text())["rows"] if options.direction in (r[1], "both")
            and (not options.kinds or r[0] in options.kinds.split(","))]
    random.Random(1).shuffle(rows)  # so that time that runs out leaves all kinds
    started = time.monotonic()
    for place, row in enumerate(rows):
        if time.monotonic() - started > options.seconds:
            print(f"out of time: {len(rows) - place} shapes were not measured", file=sys.stderr)
            break
        torch.cuda.empty_cache()
        case = Case(row)
        times = times_of(calls_of(lib, case, options.schedules.split(","), not options.no_cudnn), options.repeat, flush)
        common = {"device": torch.cuda.get_device_name(), "clock_mhz": int(query("clocks.sm") or 0),
                  "versions": {"tessera": lib.version(), "torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version()),
                               "driver": query("driver_version")},
                  "date": datetime.date.today().isoformat(), "commit": options.commit}
        records = [record(case, name, t, common) for name, t in times.items()]
        with open(options.out, "a") as out:
            out.writelines(json.dumps(r) + "\n" for r in records)
        print(*row, *(f"{r['by']} {r['schedule']} {r['ms']:.4f}" for r in records), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
