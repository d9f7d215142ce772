#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the CUDA kernels move, as Nsight Compute counts them: one Record for each schedule and shape.

    python3 bench/compare/ncu_bytes.py build/tessera [--out records.jsonl] [--commit HASH] [--schedules fa2,fa3]

`dram` counts the bytes read from and written to device memory, `l2` those between the multiprocessors and the L2 cache;
a call's kernels are added up. Caches are cold before each kernel. `tessera roofline` and docs/model.md have the counted
bytes beside them.
"""
import argparse
import csv
import datetime
import io
import json
import re
import subprocess
import sys

# head_dim, heads_q/heads_kv, causal, batch, len: K and V of all heads are more than the L2 holds.
SHAPES = [(128, "16/16", False, 4, 4096), (128, "16/16", True, 4, 4096), (64, "32/32", False, 4, 4096),
          (128, "64/8", True, 1, 8192)]
METRICS = {"dram": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
           "l2": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum")}
OTHERS = ("lts__t_bytes.sum", "lts__t_sectors_srcunit_tex.sum", "gpu__time_duration.sum")
KERNELS = r"regex:^(scores_kernel|softmax_kernel|values_kernel|forward_kernel|forward_fp32_kernel)"
UNITS = {"": 1, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "nsecond": 1e-6, "usecond": 1e-3,
         "msecond": 1, "ns": 1e-6, "us": 1e-3, "ms": 1}


def profile(tessera, schedule, shape):
    dim, heads, causal, batch, length = shape
    command = [tessera, "bench", "--backend", "cuda", "--schedule", schedule, "--dtype", "bf16", "--head-dim", str(dim),
               "--heads", heads, "--batch", str(batch), "--len", str(length), "--repeat", "1"]
    if causal:
        command += ["--causal", "bottom-right"]
    metrics = ",".join([m for pair in METRICS.values() for m in pair] + list(OTHERS))
    ncu = ["ncu", "--csv", "--page", "raw", "--metrics", metrics, "-k", KERNELS, *command]
    done = subprocess.run(ncu, capture_output=True, text=True)
    table = done.stdout[done.stdout.find('"ID"'):]
    rows = list(csv.DictReader(io.StringIO(table)))
    if done.returncode != 0 or len(rows) < 3:
        print(f"{schedule} {shape}: nothing measured\n{done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
        return None, None
    units, calls = rows[0], rows[1:]
    last = calls[len(calls) // 2:]  # the first call warms up
    totals = {name: sum(float(row[name].replace(",", "")) for row in last) * UNITS[units[name]]
              for name in units if name in metrics.split(",")}
    return totals, [re.sub(r"<.*", "", row["Kernel Name"]) for row in last]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("--schedules", help="comma-separated; default: all that have a CUDA forward")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    if not args.schedules:
        listed = subprocess.run([args.tessera, "list", "--json"], capture_output=True, text=True, check=True).stdout
        args.schedules = ",".join(k["schedule"] for k in json.loads(listed)["kernels"]
                                  if k["backend"] == "cuda" and k["pass"] == "forward")
    device = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip().split(", ")
    ncu = re.search(r"Version (\S+)", subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout)
    records = []
    print(f"{'schedule':9} {'dim':>4} {'heads':>6} {'causal':>6} {'batch x len':>12} {'DRAM MB':>10} {'L2 MB':>10}")
    for shape in SHAPES:
        for schedule in args.schedules.split(","):
            totals, kernels = profile(args.tessera, schedule, shape)
            if totals is None:
                continue
            dim, heads, causal, batch, length = shape
            level = {name: sum(totals[m] for m in pair) for name, pair in METRICS.items()}
            print(f"{schedule:9} {dim:4} {heads:>6} {causal!s:>6} {f'{batch} x {length}':>12} {level['dram'] / 1e6:10.1f} "
                  f"{level['l2'] / 1e6:10.1f}   {({m: round(totals[m] / 1e6, 1) for m in OTHERS[:2]})} {kernels}", flush=True)
            q, kv = (int(h) for h in heads.split("/"))
            records.append({
                "what": "measured", "by": "tessera", "schedule": schedule, "kernel": f"cuda.{schedule}.forward",
                "pass": "forward", "dtype": "bf16", "batch": batch, "len_q": length, "len_kv": length, "heads_q": q,
                "heads_kv": kv, "head_dim": dim, "head_dim_v": dim, "mask": "causal" if causal else "none",
                "deterministic": True, "ms": totals["gpu__time_duration.sum"], "bytes": level, "device": device[0],
                "versions": {"driver": device[1], "ncu": ncu[1] if ncu else "unknown"},
                "date": datetime.date.today().isoformat(), "commit": args.commit})
    if args.out:
        with open(args.out, "w") as out:
            out.writelines(json.dumps(r) + "\n" for r in records)


if __name__ == "__main__":
    main()
