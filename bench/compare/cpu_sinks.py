#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention with sinks beside the same call without, on one thread of the CPU.

    python3 bench/compare/cpu_sinks.py build/src/libtessera.so [--seconds 6]

tessera is loaded as a shared library (cmake -DBUILD_SHARED_LIBS=ON) and called through its C ABI. The calls of a shape
alternate in blocks, in CPU time. `with / without` is the median of the ratios of neighbouring blocks. The backward computes
the gradient of the sinks too.
"""
import argparse
import ctypes
import statistics
import time

import torch

import abi
from cpu_decode import DTYPES, ratio
from host import alternate

# name: batch, len_q, len_kv, heads, heads_kv, head_dim, causal
SHAPES = {"prefill 1,024": (1, 1024, 1024, 8, 8, 128, 1), "prefill 128": (1, 128, 128, 8, 8, 64, 1),
          "decode 4,096": (1, 1, 4096, 32, 8, 128, 0), "decode 512": (4, 1, 512, 32, 8, 128, 0),
          "4 queries 2,048": (1, 4, 2048, 16, 4, 128, 1)}


def tensors_of(dtype, shape):
    """Tensors of both passes, which the calls with and without sinks share."""
    batch, len_q, len_kv, heads, heads_kv, dim, _ = shape
    rows = {name: torch.randn(batch, heads, len_q, dim).to(DTYPES[dtype]) for name in ("q", "o", "d_o", "dq")}
    keys = {name: torch.randn(batch, heads_kv, len_kv, dim).to(DTYPES[dtype]) for name in ("k", "v", "dk", "dv")}
    return {**rows, **keys, "lse": torch.empty(batch, heads, len_q), "sinks": torch.randn(heads), "dsinks": torch.empty(heads)}


def call_of(lib, tensors, shape, sinks, direction):
    batch, len_q, len_kv, heads, heads_kv, dim, causal = shape
    problem = {"dtype": abi.DTYPES[tensors["q"].dtype], "batch": batch, "len_q": len_q, "len_kv": len_kv, "heads_q": heads,
               "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "causal": causal, "sinks": int(sinks)}
    names = ["q", "k", "v", "o", "lse", *(["sinks"] if sinks else [])]
    how = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=1)
    forward = lib.prepare(problem, how, abi.FORWARD, {name: tensors[name] for name in names})
    if direction == abi.FORWARD:
        return forward
    forward()
    names += ["d_o", "dq", "dk", "dv", *(["dsinks"] if sinks else [])]
    return lib.prepare(problem, how, abi.BACKWARD, {name: tensors[name] for name in names})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--seconds", type=float, default=6, help="per row")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    torch.set_num_threads(1)
    print("one thread, CPU time; medians")
    for direction, what in ((abi.FORWARD, "forward"), (abi.BACKWARD, "backward")):
        for name, shape in SHAPES.items():
            for dtype in options.dtype.split(","):
                tensors = tensors_of(dtype, shape)
                calls = [call_of(lib, tensors, shape, sinks, direction) for sinks in (False, True)]
                without, with_sinks = alternate(calls, options.seconds, time.process_time)
                print(f"{what:>8} {name:>16} {dtype} {statistics.median(without):8.3f} ms without "
                      f"{statistics.median(with_sinks):8.3f} with {ratio(with_sinks, without):6.3f} with / without", flush=True)


if __name__ == "__main__":
    main()
