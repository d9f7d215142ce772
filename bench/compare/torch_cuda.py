#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times tessera's CUDA kernels beside PyTorch's FlashAttention-2 and cuDNN in one process, call by call in turn.

    python3 bench/compare/torch_cuda.py build/src/libtessera.so [--pass backward [--residual both]] [--schedules fa3]
        [--rows 128] [--shapes few_heads.json] [--dtype fp16] [--fa3] [--before other/libtessera.so] [--out records.jsonl]

--fa3 adds FlashAttention-3's forward, from the package `fa3-fwd` of PyPI. --before times another build of the library
beside this one, in the same process and order, and prints the speedup of this one.

The shapes and targets are those of h200_forward.json (times cuDNN) and of h200_backward.json (TFLOP/s of the better of
FlashAttention-3 and -4; torch_backward.py explains --residual). Before each call 256 MiB are written, so that no operand is
left in L2. A figure is the median over calls in random order, between CUDA events; FLOP count visible pairs. Before timing,
each of tessera's results is compared with PyTorch's in fp32 for the last 1,024 queries of the last head of the first
sequence: O to 5e-3 of its norm, LSE to 1e-3. This detects grossly wrong kernels only; `tessera check` tests the contract.
A schedule that refuses a shape, or whose workspace does not fit, has no figure for it.
"""
import argparse
import ctypes
import datetime
import functools
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import abi
import torch_backward

HERE = pathlib.Path(__file__).parent
FA3_FWD = "0.0.3"  # the version whose operator fa3_call() knows


def gold(q, k, v, causal):
    """O and LSE of the last queries of the first sequence's last head, in fp32 (PyTorch's matrix products, unfused)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q[:1, -1:].float(), k[:1, -1:].float(), v[:1, -1:].float()
    assert group >= 1
    rows = slice(max(0, q.shape[2] - 1024), None)  # the last queries: they see the most keys
    s = q[:, :, rows] @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        i = torch.arange(q.shape[2], device=q.device)[rows]
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device)[None] > i[:, None], -math.inf)
    return rows, torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def check(name, o, lse, q, k, v, causal):
    rows, right_o, right_lse = gold(q, k, v, causal)
    error = ((o[:1, -1:, rows].float() - right_o).norm() / right_o.norm()).item()
    lse_error = (lse[:1, -1:, rows] - right_lse).abs().max().item()
    if not (error < 5e-3 and lse_error < 1e-3):
        sys.exit(f"wrong result of {name}: O {error}, LSE {lse_error}")
    return error


def fa3_call(q, k, v, causal):
    """FlashAttention-3's forward as `fa3-fwd` 0.0.3 registers it: [batch, len, heads, dim], O and LSE."""
    import fa3_fwd._C  # noqa: F401  (registers torch.ops.fa3_fwd)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return lambda: torch.ops.fa3_fwd.fwd(q, k, v, is_causal=bool(causal))


def calls_of(lib, row, schedules, dtype=torch.bfloat16, fa3=False):
    dim, heads_q, heads_kv, causal, batch, length = row[:6]
    make = lambda heads: torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
    q, k, v = make(heads_q), make(heads_kv), make(heads_kv)
    shape = {"dtype": abi.DTYPES[dtype], "batch": batch, "len_q": length, "len_kv": length, "heads_q": heads_q, "heads_kv": heads_kv,
             "head_dim": dim, "head_dim_v": dim, "causal": causal}

    def torch_call(backend):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=heads_q != heads_kv)
        return call
    calls = {"fa2": torch_call(SDPBackend.FLASH_ATTENTION), "cudnn": torch_call(SDPBackend.CUDNN_ATTENTION)}
    if fa3: calls["fa3 fa3"] = fa3_call(q, k, v, causal)
    for schedule in schedules:
        o = torch.full_like(q, math.nan)
        lse = torch.full((batch, heads_q, length), math.nan, device="cuda")
        options = abi.Options(struct_size=ctypes.sizeof(abi.Options), backend=abi.CUDA, schedule=abi.SCHEDULES[schedule])
        name = f"tessera {schedule}"
        try:
            calls[name] = lib.prepare(shape, options, abi.FORWARD, dict(q=q, k=k, v=v, o=o, lse=lse))
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:  # refused, or no memory for its workspace
            lines = str(error).splitlines()
            reason = next((line for line in lines if f"cuda.{schedule}." in line), lines[0])
            print(f"{name}, {shape}: {reason.strip()}", file=sys.stderr)
            continue
        calls[name]()
        check(name, o, lse, q, k, v, causal)
    return calls


def times_of(calls, repeat, flush):
    """Milliseconds of each call, with a cold L2, in random order: the clock of a long call depends on the power of the
    previous ones. A call that always followed FlashAttention-2, which takes less power, ran at 1.63 GHz, the call after
    it at 1.42 (64 heads of 32,768 keys on an H200)."""
    times = {name: [] for name in calls}
    order = random.Random(0)
    for call in calls.values():
        call()
    for _ in range(repeat):
        for name, call in order.sample(list(calls.items()), len(calls)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return times


def query(field):
    done = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 else ""


def record(row, name, times, direction, common):
    common = dict(common)
    dim, heads_q, heads_kv, causal, batch, length = row[:6]
    quarters = statistics.quantiles(times, n=4)
    pairs = length * (length + 1) // 2 if causal else length * length
    by, _, schedule = name.partition(" ")
    schedule = schedule.removesuffix(" summed")
    return {"what": "measured", "by": by, "schedule": schedule or ("fa2" if by == "fa2" else ""), "pass": direction,
            "dtype": common.pop("dtype"), "batch": batch, "len_q": length, "len_kv": length, "heads_q": heads_q,
            "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim, "mask": "causal" if causal else "none",
            "deterministic": direction == "forward" or by == "tessera", "ms": quarters[1], "ms_spread": quarters[2] - quarters[0],
            "tflops": (4 if direction == "forward" else 10) * batch * heads_q * dim * pairs / quarters[1] * 1e-9, **common}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--schedules", default="fa3", help="tessera's, comma-separated")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rows", help="head dims, comma-separated: only rows of these")
    parser.add_argument("--shapes", help="another list of shapes, such as few_heads.json")
    parser.add_argument("--residual", choices=("kept", "summed", "both"), default="kept",
                        help="backward: with the residual of O, without it, or both")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--fa3", action="store_true", help="forward: FlashAttention-3 by the package fa3-fwd beside the others")
    parser.add_argument("--before", metavar="LIBRARY", help="another build of the library, timed in the same process")
    parser.add_argument("--out", help="append Records (JSON lines) to this file")
    parser.add_argument("--commit", default="unknown", help="of the library")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    before = abi.Library(options.before) if options.before else None
    schedules = options.schedules.split(",")
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    shapes = pathlib.Path(options.shapes) if options.shapes else HERE / f"h200_{options.direction}.json"
    rows = json.loads(shapes.read_text())["rows"]
    if options.rows:
        rows = [r for r in rows if str(r[0]) in options.rows.split(",")]
    forward = options.direction == "forward"
    prepare = functools.partial(calls_of, fa3=options.fa3) if forward else \
        functools.partial(torch_backward.calls_of, residual=options.residual)
    ends = {"kept": [""], "summed": [" summed"], "both": ["", " summed"]}[options.residual]
    names = schedules if forward else [s + end for s in schedules for end in ends]
    peer = "cudnn" if forward else "fa2"
    ratios = {s: [] for s in names}
    gains = {s: [] for s in names}  # over the build before
    print(f"TFLOP/s; (times {peer})\n dim heads  mask   batch x len     fa2 cudnn  " + "  ".join(f"{s:>12}" for s in names) + "  target")
    for row in rows:
        torch.cuda.empty_cache()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
        calls = prepare(lib, row, schedules, dtype=dtype)
        if before:
            others = prepare(before, row, schedules, dtype=dtype)
            calls.update({f"before {name.removeprefix('tessera ')}": call for name, call in others.items()
                          if name.startswith("tessera ")})
        times = times_of(calls, options.repeat, flush)
        common = {"dtype": options.dtype, "device": torch.cuda.get_device_name(), "clock_mhz": int(query("clocks.sm") or 0),
                  "versions": {"tessera": lib.version(), "torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version()),
                               "driver": query("driver_version")},
                  "date": datetime.date.today().isoformat(), "commit": options.commit}
        records = {name: record(row, name, t, options.direction, common) for name, t in times.items()}
        for name, r in records.items(): r.update(getattr(calls[name], "notes", {}))
        if "fa3 fa3" in records:
            records["fa3 fa3"]["versions"] = {"fa3-fwd": FA3_FWD, "torch": torch.__version__, "driver": query("driver_version")}
        if options.out:
            with open(options.out, "a") as out:
                out.writelines(json.dumps(r) + "\n" for r in records.values() if r["by"] != "before")
        speed = {name: r["tflops"] for name, r in records.items()}
        of_peer = lambda name: f"{speed[name]:5.0f}" if name in speed else "    -"
        line = f"{row[0]:4} {row[1]:>2}/{row[2]:<2} {'causal' if row[3] else 'full':>6} {row[4]:4} x {row[5]:<6} {of_peer('fa2')} {of_peer('cudnn')}  "
        for s in names:
            if f"tessera {s}" not in speed:
                line += "      -       "
                continue
            ratio = speed[f"tessera {s}"] / speed[peer]
            if forward: ratios[s].append(ratio / row[6])
            elif row[7]: ratios[s].append(speed[f"tessera {s}"] / row[7])
            line += f"{speed[f'tessera {s}']:5.0f} ({ratio:.2f})  "
        for s in names:
            if f"before {s}" in speed and f"tessera {s}" in speed:
                gains[s].append(speed[f"tessera {s}"] / speed[f"before {s}"])
                line += f"{gains[s][-1]:.3f} of before  "
        if "fa3 fa3" in speed: line += f"fa3 {speed['fa3 fa3']:.0f}  "
        print(line + (f"{row[6]:.2f}" if forward else f"{row[7]:.0f}" if row[7] else "-"), flush=True)
    for s, values in gains.items():
        if values:
            print(f"{s}: of the build before, geometric mean {math.exp(statistics.fmean(map(math.log, values))):.4f}, "
                  f"{min(values):.3f} to {max(values):.3f}")
    for s, values in ratios.items():
        if values: print(f"{s}: of target, geometric mean {math.exp(statistics.fmean(map(math.log, values))):.3f}, worst {min(values):.3f}")


if __name__ == "__main__":
    main()
