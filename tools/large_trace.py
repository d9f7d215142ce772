#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a large trace as PyTorch's profiler writes it, to stdout: for the memory and time of `tessera which`.

    tools/large_trace.py --kernels 3300000 | /usr/bin/time -v build/tessera which - --torch 2.11 > /dev/null
    tools/large_trace.py --repeat tests/diagnose/traces/gpt2_eager.json.gz --kernels 870000 | ... # a step over and over

Without --repeat each call is an operator of attention with shapes, its launch and its kernel, and a GEMM beside it.
"""
import argparse
import gzip
import json
import signal
import sys

HEAD = ('{"schemaVersion":1,"deviceProperties":[{"id":0,"name":"NVIDIA H200","computeMajor":9,"computeMinor":0,'
        '"numSms":132}],"traceEvents":[')
KERNEL = ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
          "cutlass::bfloat16_t, Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, true, false, false, "
          "true, true, false, false>(pytorch_flash::Flash_fwd_params)")
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"


def of_one_call(number):
    """The events of a call, which takes 100 us: (operator, launch, kernel) of attention and of a GEMM."""
    shape = [1, 32, 1024 + 128 * (number % 16), 128]
    for part, (op, kernel) in enumerate((("aten::scaled_dot_product_attention", KERNEL), ("aten::mm", GEMM))):
        at, key = 100 * number + 50 * part, 2 * number + part + 1
        common = {"ph": "X", "pid": 1, "tid": 1}
        inputs = {"External id": key, "Record function id": 0, "Input Dims": [shape, shape, shape, [], [], [], [], []],
                  "Input type": ["c10::BFloat16"] * 3 + ["", "Scalar", "Scalar", "", "Scalar"],
                  "Concrete Inputs": ["", "", "", "", "0.", "True", "", "False"]}
        yield {**common, "cat": "cpu_op", "name": op, "ts": at, "dur": 20, "args": inputs}
        yield {**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 5, "dur": 3,
               "args": {"External id": key, "correlation": key}}
        yield {**common, "pid": 0, "tid": 7, "cat": "kernel", "name": kernel, "ts": at + 25, "dur": 20,
               "args": {"External id": key, "correlation": key, "device": 0, "stream": 7, "grid": [64, 1, 32],
                        "block": [128, 1, 1], "registers per thread": 255, "est. achieved occupancy %": 12}}


def repeated(path):
    """The events of a file over and over, each time later and with new ids."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X"]
    begin, end = min(e["ts"] for e in timed), max(e["ts"] + e["dur"] for e in timed)
    ids = [e["args"].get(key, 0) for e in timed for key in ("External id", "correlation") if "args" in e]
    step = max(ids) + 1
    time = 0
    while True:
        for event in timed:
            args = {key: value + time * step if key in ("External id", "correlation") else value
                    for key, value in event.get("args", {}).items()}
            yield {**event, "ts": event["ts"] + time * (end - begin + 10), "args": args}
        time += 1


def all_calls():
    number = 0
    while True:
        yield from of_one_call(number)
        number += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", type=int, required=True, help="runs of kernels in the trace")
    parser.add_argument("--repeat", metavar="TRACE", help="a trace of PyTorch's profiler, .json or .json.gz")
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    kernels = size = 0
    size += sys.stdout.write(HEAD)
    for event in repeated(options.repeat) if options.repeat else all_calls():
        size += sys.stdout.write((",\n" if kernels or size > len(HEAD) else "") + json.dumps(event))
        kernels += event.get("cat") == "kernel"
        if kernels == options.kernels:
            break
    size += sys.stdout.write("]}\n")
    print(f"{kernels} kernels, {size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
