#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times calls with attention sinks beside the same calls without, on CUDA, forward and backward, in one process.

    python3 bench/compare/cuda_sinks.py build/src/libtessera.so [--before other/libtessera.so] [--out rows.jsonl]

bf16, the heads of gpt-oss (64 on 8 of 64) and of an 8B model (32 on 8 of 128), causal and in a window of 128 keys. The backward
has dsinks. --before adds another build of the library, without sinks. Medians over calls in random order with a cold L2.
"""
import argparse
import ctypes
import json
import statistics

import torch

import abi
from torch_cuda import query, times_of

SHAPES = [(64, 8, 64, 1, 8192, None), (64, 8, 64, 1, 8192, 127), (64, 8, 64, 8, 1024, None), (64, 8, 64, 8, 1024, 127),
          (32, 8, 128, 1, 8192, None), (32, 8, 128, 4, 2048, None), (16, 16, 64, 64, 256, None)]


def calls_of(lib, heads_q, heads_kv, dim, batch, length, window, sinks):
    make = lambda heads: torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v, d_o = make(heads_q), make(heads_kv), make(heads_kv), make(heads_q)
    shape = dict(dtype=abi.BF16, batch=batch, len_q=length, len_kv=length, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim,
                 head_dim_v=dim, causal=1)
    if window is not None:
        shape.update(window_left=window, window_right=0)
    out = dict(o=torch.empty_like(q), lse=torch.empty(batch, heads_q, length, device="cuda"),
               o_residual=torch.empty_like(q, dtype=torch.int8))
    gradients = dict(dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
    inputs = dict(q=q, k=k, v=v, **out)
    if sinks:
        shape["sinks"] = 1
        inputs["sinks"] = torch.randn(heads_q, device="cuda")
        gradients["dsinks"] = torch.empty(heads_q, device="cuda")
    options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA)
    return {"forward": lib.prepare(shape, options, abi.FORWARD, inputs),
            "backward": lib.prepare(shape, options, abi.BACKWARD, dict(inputs, d_o=d_o, **gradients))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--before", metavar="LIBRARY", help="another build, whose calls have no sinks")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", help="append the figures (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    builds = {"without": (abi.Library(options.library), False), "sinks": (abi.Library(options.library), True)}
    if options.before:
        builds["before"] = (abi.Library(options.before), False)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    print(f"{'microseconds':34} " + " ".join(f"{name:>9}" for name in builds) + "  sinks / without")
    for shape in SHAPES:
        made = {name: calls_of(lib, *shape, sinks) for name, (lib, sinks) in builds.items()}
        for direction in ("forward", "backward"):
            calls = {name: of[direction] for name, of in made.items()}
            us = {name: 1e3 * statistics.median(t) for name, t in times_of(calls, options.repeat, flush).items()}
            heads_q, heads_kv, dim, batch, length, window = shape
            what = f"{heads_q}/{heads_kv} of {dim}, {batch} x {length}" + (f", window {window + 1}" if window else "")
            print(f"{what:25} {direction:8} " + " ".join(f"{us[n]:9.1f}" for n in builds) + f"  {us['sinks'] / us['without']:.3f}",
                  flush=True)
            if options.out:
                row = {"shape": what, "pass": direction, "us": us, "device": torch.cuda.get_device_name(),
                       "clock_mhz": int(query("clocks.sm") or 0), "torch": torch.__version__, "commit": options.commit}
                with open(options.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
        del made
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
