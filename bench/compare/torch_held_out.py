#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the shapes of h200_held_out.json: other head_dims, few heads, cross lengths, windows, decoding. No constant of the
cost model is fitted to them; `tessera roofline --accuracy` judges the model by them.

    python3 bench/compare/torch_held_out.py build/src/libtessera.so --out bench/results/h200/held_out.jsonl
    python3 bench/compare/torch_held_out.py build/src/libtessera.so --seed 11 --count 90 --out bench/results/h200/blind.jsonl

--seed draws other, unseen shapes (drawn_shapes.py), ragged batches among them. --dropout 0.1 times tessera's kernels
alone, with that dropout; each is compared with the first one's results, since all have one mask (docs/numerics.md).

PyTorch's FlashAttention-2 runs by its own operator, which takes windows and unequal lengths. cuDNN runs if
scaled_dot_product_attention can express the call; its backward uses the underlying operator, since the host dominates short
calls through autograd. 1 GiB is written before each call: no operand is left in L2, and the host has issued a short call
before the GPU starts it. Calls of all kernels alternate; a figure is the median between CUDA events. Before timing, each of
tessera's results is compared with FlashAttention-2's: O, LSE and the gradients to 2 % of their norm, which detects grossly
wrong kernels only. tessera's backward gets the residual of O if it takes one (docs/numerics.md). Refusals are printed on
stderr and have no Record.
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
import drawn_shapes
from torch_cuda import query, times_of

SHAPES = pathlib.Path(__file__).parent / "h200_held_out.json"
MOST_SCORES = 4 << 30  # elements of S up to which `standard` runs: 16 GiB


class Case:
    """A row of the file with its tensors: [batch, len, heads, head_dim], or [total, heads, head_dim] of a ragged batch,
    whose `lens` are the lengths of its sequences."""

    def __init__(self, row, dropout=0.0):
        self.dropout = dropout
        self.results = {}  # of tessera's first kernel with dropout
        (self.kind, self.direction, self.dim, self.heads_q, self.heads_kv, self.batch, self.len_q, self.len_kv,
         self.mask) = row
        self.causal = self.mask == "causal"
        self.window = int(self.mask.split()[1].split(",")[0]) if self.mask.startswith("window") else None
        self.lens = self.len_q if isinstance(self.len_q, list) else None
        if self.lens:
            self.len_q = self.len_kv = max(self.lens)
            self.starts = torch.tensor([sum(self.lens[:i]) for i in range(self.batch + 1)], device="cuda", dtype=torch.int32)
        rows = lambda length: (sum(self.lens),) if self.lens else (self.batch, length)
        make = lambda length, heads: torch.randn(*rows(length), heads, self.dim, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v = make(self.len_q, self.heads_q), make(self.len_kv, self.heads_kv), make(self.len_kv, self.heads_kv)
        self.d_o = torch.randn_like(self.q)
        self.limits = {} if self.window is None else {"window_size_left": self.window, "window_size_right": 0}

    def pairs(self):
        """Visible pairs of one head, of all sequences: a band below the bottom-right diagonal, or all."""
        if self.lens:
            return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lens)
        return self.batch * self.pairs_of_sequence()

    def pairs_of_sequence(self):
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
        if self.dropout:
            fields.update(dropout_probability=self.dropout, dropout_seed=20261126)
        if self.lens:
            fields.update(ragged=1, total_q=sum(self.lens), total_kv=sum(self.lens))
        return fields

    def heads_first(self, *tensors):
        """The tensors in the layout of abi.view() and scaled_dot_product_attention; ragged ones unchanged."""
        return [t if self.lens else t.transpose(1, 2) for t in tensors]

    def torch_heads_first(self):
        return self.heads_first(self.q, self.k, self.v, self.d_o)

    def sequences(self):
        """The arguments with the first rows of sequences."""
        return dict(cu_seqlens_q=self.starts, cu_seqlens_kv=self.starts) if self.lens else {}

    def cudnn_can(self):
        """Can scaled_dot_product_attention express this case? Its causal mask is aligned top-left."""
        return not self.lens and self.window is None and (not self.causal or self.len_q == self.len_kv)


def flash_attention(case):
    """Returns functions of FlashAttention-2's forward and backward, and O and LSE. head_dims that are multiples of 8 need no padding."""
    ops, c = torch.ops.aten, case
    starts = (c.starts, c.starts) if c.lens else (None, None)
    lengths = (*starts, c.len_q, c.len_kv, 0.0, c.causal)

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
    ops, scores = torch.ops.aten, (0.0, case.causal)  # no dropout
    o, lse, starts_q, starts_kv, len_q, len_kv, seed, offset, _ = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, *scores, False)
    kept = (o, lse, seed, offset, None, starts_q, starts_kv, len_q, len_kv)
    return lambda: ops._scaled_dot_product_cudnn_attention_backward(d_o, q, k, v, *kept, *scores)


def differs(name, got, expected):
    error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
    return f"{name}: {error:.3g}" if not error < 2e-2 else ""


def with_residual(lib, case, options, inputs):
    """O, LSE and the residual of O by tessera's default forward, if the backward of these options takes it; always under
    dropout, which only tessera's own forward reproduces."""
    any_schedule = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA)
    takes_residual = lib.plan(case.problem(), options, abi.BACKWARD).o_residual and lib.plan(case.problem(), any_schedule, abi.FORWARD).o_residual
    if not takes_residual and not case.dropout:
        return None
    q = inputs["q"]
    shape = (case.heads_q, q.shape[0]) if case.lens else q.shape[:3]
    kept = dict(o=torch.empty_like(q), lse=torch.empty(shape, device=q.device))
    if takes_residual:
        kept["o_residual"] = torch.empty_like(q, dtype=torch.int8)
    lib.prepare(case.problem(), any_schedule, abi.FORWARD, dict(**inputs, **case.sequences(), **kept))()
    return kept


def ours(lib, case, schedule, o, lse, gradients):
    """Returns a function that runs tessera's kernel, after comparing its results with FlashAttention-2's."""
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
    q, k, v, d_o = case.torch_heads_first()
    inputs = dict(q=q, k=k, v=v)
    notes = {}
    if case.direction == "forward":
        mine = {"o": torch.full_like(q, math.nan), "lse": torch.full_like(lse, math.nan)}
        expected = {"o": case.heads_first(o)[0], "lse": lse}
        call = lib.prepare(case.problem(), options, abi.FORWARD, dict(**inputs, **case.sequences(), **mine))
    else:
        mine = {"dq": torch.full_like(q, math.nan), "dk": torch.full_like(k, math.nan), "dv": torch.full_like(v, math.nan)}
        expected = dict(zip(mine, case.heads_first(*gradients)))
        kept = with_residual(lib, case, options, inputs)
        notes = {"features": "residual of O"} if kept and "o_residual" in kept else {}
        kept = kept or dict(o=case.heads_first(o)[0], lse=lse)
        call = lib.prepare(case.problem(), options, abi.BACKWARD, dict(**inputs, d_o=d_o, **case.sequences(), **kept, **mine))
    call()
    if case.dropout:
        case.results = case.results or {name: t.clone() for name, t in mine.items()}
        expected = case.results
    wrong = " ".join(filter(None, (differs(name, mine[name], expected[name]) for name in mine)))
    if wrong:
        raise RuntimeError(f"differs from {'the first schedule' if case.dropout else 'FlashAttention-2'}: " + wrong)
    call.notes = notes
    return call


def calls_of(lib, case, schedules, with_cudnn):
    forward, backward, o, lse = flash_attention(case)
    is_forward = case.direction == "forward"
    calls = {} if case.dropout else {"fa2": forward if is_forward else backward}
    gradients = None if is_forward else backward()
    candidates = {f"tessera {s}": lambda s=s: ours(lib, case, s, o, lse, gradients) for s in schedules
                  if s != "standard" or case.batch * case.heads_q * case.len_q * case.len_kv <= MOST_SCORES}
    if with_cudnn and not case.dropout and case.cudnn_can():
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


def record(case, name, times, notes, common):
    by, _, schedule = name.partition(" ")
    quarters = statistics.quantiles(times, n=4)
    flop = (4 if case.direction == "forward" else 10) * case.heads_q * case.dim * case.pairs()
    features = ("ragged" if case.lens else "", f"dropout {case.dropout:g}" if case.dropout else "", notes.get("features"))
    notes = {**notes, "features": ", ".join(filter(None, features))} if any(features) else notes
    if case.lens:
        notes = {**notes, "lens_q": case.lens, "lens_kv": case.lens}
    return {"what": "measured", "by": by, "schedule": schedule or ("fa2" if by == "fa2" else ""), "pass": case.direction,
            "dtype": "bf16", "batch": case.batch, "len_q": case.len_q, "len_kv": case.len_kv, "heads_q": case.heads_q,
            "heads_kv": case.heads_kv, "head_dim": case.dim, "head_dim_v": case.dim, "mask": case.mask_text(),
            "deterministic": case.direction == "forward" or by == "tessera", "ms": quarters[1],
            "ms_spread": quarters[2] - quarters[0], "tflops": flop / quarters[1] * 1e-9, **notes, **common}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--kinds", help="comma-separated; default: all")
    parser.add_argument("--schedules", default="fa3,fa2,fa1,standard", help="tessera's, comma-separated")
    parser.add_argument("--no-cudnn", action="store_true", help="its kernels take a second each to be made")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--seed", type=int, help="draw shapes instead of those of the file")
    parser.add_argument("--count", type=int, default=90, help="shapes to draw")
    parser.add_argument("--short", action="store_true", help="draw calls of up to 2e10 FLOP, not of more")
    parser.add_argument("--up-to", type=int, default=256, help="of the shapes those of head_dims up to this")
    parser.add_argument("--dropout", type=lambda text: [float(p) for p in text.split(",")], default=[0.0],
                        help="probabilities, comma-separated: shapes have them in turn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no new shape after so many")
    parser.add_argument("--out", required=True, help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    flush = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    passes = ("forward", "backward") if options.direction == "both" else (options.direction,)
    if options.seed is None:
        rows = [r for r in json.loads(SHAPES.read_text())["rows"] if r[1] in passes]
        random.Random(1).shuffle(rows)  # a run that ends early has covered all kinds
    else:
        sizes = dict(longest=2048, least=1e7, most=2e10) if options.short else {}
        rows = drawn_shapes.drawn(options.seed, options.count, passes, **sizes)
    if options.kinds:
        rows = [r for r in rows if r[0] in options.kinds.split(",")]
    rows = [r for r in rows if r[2] <= options.up_to]
    started = time.monotonic()
    for place, row in enumerate(rows):
        if time.monotonic() - started > options.seconds:
            print(f"out of time: {len(rows) - place} shapes were not measured", file=sys.stderr)
            break
        torch.cuda.empty_cache()
        case = Case(row, options.dropout[place % len(options.dropout)])
        calls = calls_of(lib, case, options.schedules.split(","), not options.no_cudnn)
        times = times_of(calls, options.repeat, flush)
        common = {"device": torch.cuda.get_device_name(), "clock_mhz": int(query("clocks.sm") or 0),
                  "versions": {"tessera": lib.version(), "torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version()),
                               "driver": query("driver_version")},
                  "date": datetime.date.today().isoformat(), "commit": options.commit}
        records = [record(case, name, t, getattr(calls[name], "notes", {}), common) for name, t in times.items()]
        with open(options.out, "a") as out:
            out.writelines(json.dumps(r) + "\n" for r in records)
        print(*row, *(f"{r['by']} {r['schedule']} {r['ms']:.4f}" for r in records), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
