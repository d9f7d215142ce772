#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training beyond the plain case on a GPU, both passes, beside PyTorch's cuDNN, FlashAttention-2 and
memory-efficient kernels: softcap, ALiBi, dropout, biases with gradient, fp16, fp32, short rows and cross attention.

    python3 bench/compare/cuda_features_backward.py build/src/libtessera.so [--before other/libtessera.so] [--only bias]
        [--passes forward,backward] [--repeat 9] [--out records.jsonl] [--commit HASH]

The forward is that of training: it writes LSE, and the residual of O where the plan of the backward takes it. The
backward starts from its results. A peer is left out of a case that it refuses; its backward is called by autograd, whose
host work overlaps the flush of the L2. Before timing, O and the gradients are compared with the first peer's, to 2 % of
their norms (dropout: no peer has tessera's mask). --before times another build too, and prints the largest relative
difference of its results. Before each call 256 MiB are written, so that no operand is left in L2; figures are medians
over calls in random order, between CUDA events, in microseconds, and in parentheses the time over tessera's.
"""
import argparse
import ctypes
import dataclasses
import datetime
import json
import math
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
from torch_cuda import query, times_of

DEVICE, BACKEND = "cuda", abi.CUDA
PASSES = {"forward": abi.FORWARD, "backward": abi.BACKWARD}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION}
DROPOUT = dict(dropout_probability=0.1, dropout_seed=5)
SOFTCAP = dict(softcap=30.0)
ALIBI = dict(alibi=1)
# name: batch, queries, keys, heads, head_dim, causal
LONG = {"128 causal 2 x 4k": (2, 4096, 4096, 16, 128, 1), "128 causal 4 x 2k": (4, 2048, 2048, 16, 128, 1),
        "128 full 2 x 4k": (2, 4096, 4096, 16, 128, 0), "64 causal 8 x 1k": (8, 1024, 1024, 16, 64, 1),
        "64 causal 4 x 4k": (4, 4096, 4096, 32, 64, 1)}
SHORT = {"ViT 64 x 197, 12 of 64": (64, 197, 197, 12, 64, 0), "SigLIP 32 x 729, 16 of 72": (32, 729, 729, 16, 72, 0),
         "BERT 32 x 512, 16 of 64": (32, 512, 512, 16, 64, 0), "cross 2 x 4,096 on 77, 8 of 64": (2, 4096, 77, 8, 64, 0),
         "diffusion 2 x 4,096, 10 of 64": (2, 4096, 4096, 10, 64, 0),
         "diffusion 2 x 4,096, 16 of 64": (2, 4096, 4096, 16, 64, 0),
         "diffusion 1 x 4,608, 24 of 128": (1, 4608, 4608, 24, 128, 0),
         "Whisper 8 x 1,500, 20 of 64": (8, 1500, 1500, 20, 64, 0),
         "Whisper 8 x 448 on 1,500, 20 of 64": (8, 448, 1500, 20, 64, 0)}
FP32 = {"64 causal 2 x 2k": (2, 2048, 2048, 16, 64, 1), "64 full 8 x 512": (8, 512, 512, 16, 64, 0),
        "128 causal 2 x 2k": (2, 2048, 2048, 16, 128, 1), "128 full 4 x 1k": (4, 1024, 1024, 16, 128, 0),
        "64 full 2 x 4k": (2, 4096, 4096, 16, 64, 0), "128 full 2 x 4k": (2, 4096, 4096, 16, 128, 0),
        "96 causal 3 x 1,500": (3, 1500, 1500, 12, 96, 1), "128 causal 1 x 8k": (1, 8192, 8192, 8, 128, 1),
        "64 full 16 x 300": (16, 300, 300, 12, 64, 0), "32 full 64 x 384": (64, 384, 384, 4, 32, 0),
        "256 causal 2 x 1k": (2, 1024, 1024, 16, 256, 1)}
BIASES = {"T5 32 x 512, 12 of 64": ((32, 512, 512, 12, 64, 0), (1, 12, 512, 512)),
          "8 x 1,024, 16 of 64": ((8, 1024, 1024, 16, 64, 0), (1, 16, 1024, 1024)),
          "AlphaFold 64 x 384, 4 of 32": ((64, 384, 384, 4, 32, 0), (1, 4, 384, 384)),
          "AlphaFold 128 x 256, 8 of 32, a bias for each sequence": ((128, 256, 256, 8, 32, 0), (128, 8, 256, 256)),
          "16 x 777, 16 of 64": ((16, 777, 777, 16, 64, 0), (1, 16, 777, 777)),
          "16 x 512 on 1,024, 16 of 64": ((16, 512, 1024, 16, 64, 0), (1, 16, 512, 1024)),
          "8 x 1,024, 16 of 128": ((8, 1024, 1024, 16, 128, 0), (1, 16, 1024, 1024)),
          "8 x 2,048, 16 of 128, a bias for each sequence": ((8, 2048, 2048, 16, 128, 0), (8, 16, 2048, 2048))}


@dataclasses.dataclass
class Case:
    name: str
    shape: tuple  # batch, queries, keys, heads, head_dim, causal
    fields: dict = dataclasses.field(default_factory=dict)  # of a tessera_problem
    dtype: torch.dtype = torch.bfloat16
    factor: float = 1  # of the scores
    bias: tuple = ()  # shape

    def problem(self):
        batch, len_q, len_kv, heads, dim, causal = self.shape
        bias = dict(bias=1, bias_gradient=1) if self.bias else {}
        return dict(dtype=abi.DTYPES[self.dtype], batch=batch, len_q=len_q, len_kv=len_kv, heads_q=heads,
                    heads_kv=heads, head_dim=dim, head_dim_v=dim, causal=causal, **bias, **self.fields)

    def features(self):
        """The features in the words of Records."""
        names = {"softcap": "softcap {:g}", "alibi": "alibi", "dropout_probability": "dropout {:g}"}
        found = [text.format(self.fields[name]) for name, text in names.items() if name in self.fields]
        return ", ".join((["bias with gradient"] if self.bias else []) + found)

    def flop(self, direction):
        batch, len_q, len_kv, heads, dim, causal = self.shape
        pairs = len_q * (len_q + 1) // 2 if causal else len_q * len_kv
        return (4 if direction == "forward" else 10) * batch * heads * dim * pairs


def cases():
    for name, shape in LONG.items():
        yield Case(name, shape)
        yield Case(f"{name}, softcap 30", shape, SOFTCAP)
        yield Case(f"{name}, softcap 30, large scores", shape, SOFTCAP, factor=20)
        yield Case(f"{name}, ALiBi", shape, ALIBI)
        yield Case(f"{name}, dropout 0.1", shape, DROPOUT)
    for name in ("128 causal 2 x 4k", "64 causal 8 x 1k"):
        for feature, fields in (("plain", {}), ("softcap 30", SOFTCAP), ("ALiBi", ALIBI), ("dropout 0.1", DROPOUT)):
            yield Case(f"fp16 {name}, {feature}", LONG[name], fields, torch.float16)
    for name, (shape, bias) in BIASES.items():
        yield Case(f"bias, {name}", shape, bias=bias)
    t5, shape = BIASES["T5 32 x 512, 12 of 64"]
    yield Case("bias, T5 32 x 512, 12 of 64, dropout 0.1", t5, DROPOUT, bias=shape)
    yield Case("bias, T5 32 x 512, 12 of 64, fp16", t5, dtype=torch.float16, bias=shape)
    for name, shape in FP32.items():
        yield Case(f"fp32 {name}", shape, dtype=torch.float32)
    for name, shape in SHORT.items():
        yield Case(name, shape)


class Inputs:
    """q, k, v, dO [batch, heads, len, head_dim], and a bias [batch or 1, heads, len_q, len_kv] where the case has one."""

    def __init__(self, case):
        torch.manual_seed(0)
        batch, len_q, len_kv, heads, dim, self.causal = case.shape
        make = lambda n: torch.randn(batch, n, heads, dim, device=DEVICE, dtype=case.dtype).transpose(1, 2)  # noqa: E731
        self.q, self.k, self.v, self.d_o = make(len_q), make(len_kv), make(len_kv), make(len_q)
        self.q *= case.factor
        self.bias = torch.randn(case.bias, device=DEVICE, dtype=case.dtype) if case.bias else None
        self.dropout = case.fields.get("dropout_probability", 0.0)
        self.slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=DEVICE)


def own_calls(lib, case, inputs):
    """tessera's calls by pass, their results, and words of their Records. abi.view() exchanges the middle dimensions of tensors of rank 4, so a
    bias is handed over with these exchanged."""
    problem = case.problem()
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=BACKEND)
    q, k, v = inputs.q, inputs.k, inputs.v
    plans = {name: lib.plan(problem, options, which) for name, which in PASSES.items()}
    kept = dict(o=torch.full_like(q, math.nan), lse=torch.empty(q.shape[:3], device=DEVICE))
    if plans["backward"].o_residual:
        kept["o_residual"] = torch.empty_like(q, dtype=torch.int8)
    given = dict(q=q, k=k, v=v, **kept)
    gradients = {name: torch.full_like(t, math.nan) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    handed = dict(gradients)
    if "alibi" in case.fields:
        given["alibi_slopes"] = inputs.slopes
    if inputs.bias is not None:
        gradients["dbias"] = torch.full_like(inputs.bias, math.nan)
        given["bias"], handed["dbias"] = inputs.bias.transpose(1, 2), gradients["dbias"].transpose(1, 2)
    calls = {"forward": lib.prepare(problem, options, abi.FORWARD, given),
             "backward": lib.prepare(problem, options, abi.BACKWARD, dict(given, d_o=inputs.d_o, **handed))}
    for call in calls.values():
        call()
    notes = {name: dict(kernel=plan.kernel.decode(), features="residual of O" if "o_residual" in kept else "")
             for name, plan in plans.items()}
    return calls, dict(o=kept["o"], **gradients), notes


def peer_calls(backend, inputs):
    """PyTorch's calls by pass, and their results; None where the kernel refuses the case."""
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    bias = [] if inputs.bias is None else [inputs.bias.detach().requires_grad_()]

    def run(tensors):
        mask = tensors[3] if len(tensors) > 3 else None
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors[:3], attn_mask=mask, is_causal=bool(inputs.causal),
                                                  dropout_p=inputs.dropout)

    def forward():
        with torch.no_grad():
            return run([t.detach() for t in leaves + bias])
    try:
        o = run(leaves + bias)
        backward = lambda: torch.autograd.grad(o, leaves + bias, inputs.d_o, retain_graph=True)  # noqa: E731
        return dict(forward=forward, backward=backward), dict(zip(("o", "dq", "dk", "dv", "dbias"), (o, *backward())))
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            print(f"{backend.name}: no memory", file=sys.stderr)
        return None


def largest_difference(a, b):
    """The largest of the relative differences of norms."""
    return max(((a[n].float() - b[n].float()).norm() / b[n].float().norm()).item() for n in a)


def measured(case, libraries, passes, repeat, flush):
    """(microseconds by pass and name, the last words of a line, words of tessera's Records by pass) of a case."""
    inputs = Inputs(case)
    own = {name: own_calls(lib, case, inputs) for name, lib in libraries.items()}
    results = {name: of[1] for name, of in own.items()}
    calls = {name: of[0] for name, of in own.items()}
    if not case.fields or case.fields is DROPOUT:
        for name, backend in PEERS.items():
            if found := peer_calls(backend, inputs):
                calls[name], results[name] = found
    words = ""
    peer = next((name for name in PEERS if name in results), None)
    if peer and not case.fields:
        error = largest_difference(results["tessera"], results[peer])
        if not error < 2e-2:
            words = f"  WRONG: {error:.1e} of the norms of {peer}"
    if "before" in results:
        words += f"  differs {largest_difference(results['tessera'], results['before']):.1e}"
    us = {}
    for direction in passes:
        times = times_of({name: of[direction] for name, of in calls.items()}, repeat, flush)
        us[direction] = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    return us, words, own["tessera"][2]


def record_of(case, direction, name, us, notes, common):
    """A Record of one figure. The backwards of peers carry the host work of autograd."""
    problem, own = case.problem(), name == "tessera"
    kernel = notes["kernel"] if own else ""
    more = notes["features"] if own else "autograd" if direction == "backward" else ""
    schedule = kernel.split(".")[1].replace("decode", "fa2") if own else "fa2" if name == "fa2" else ""
    return {"what": "measured", "by": name, "schedule": schedule, "kernel": kernel, "pass": direction,
            "dtype": {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[case.dtype],
            **{key: problem[key] for key in ("batch", "len_q", "len_kv", "heads_q", "heads_kv", "head_dim", "head_dim_v")},
            "mask": "causal bottom-right" if problem["causal"] else "none", "deterministic": own or direction == "forward",
            "ms": us * 1e-3, "tflops": case.flop(direction) / us * 1e-6,
            "features": ", ".join(filter(None, (case.features(), more))), "case": case.name, **common}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--before", metavar="LIBRARY", help="another build of the library")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    libraries = {"tessera": abi.Library(options.library)}
    if options.before:
        libraries["before"] = abi.Library(options.before)
    flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    common = {"device": torch.cuda.get_device_name(), "clock_mhz": int(query("clocks.sm") or 0),
              "versions": {"tessera": libraries["tessera"].version(), "torch": torch.__version__,
                           "cudnn": str(torch.backends.cudnn.version()), "driver": query("driver_version")},
              "date": datetime.date.today().isoformat(), "commit": options.commit}
    for case in cases():
        if options.only not in case.name:
            continue
        us, words, notes = measured(case, libraries, options.passes.split(","), options.repeat, flush)
        for direction, of in us.items():
            print(f"{case.name}: {direction} " +
                  ", ".join(f"{name} {t:.0f}" + ("" if name == "tessera" else f" ({t / of['tessera']:.2f})")
                            for name, t in of.items()) + words, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.writelines(json.dumps(record_of(case, direction, name, t, notes[direction], common)) + "\n"
                                    for name, t in of.items() if name != "before")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
