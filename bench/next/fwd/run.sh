#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# bash run.sh FOLDER OUT: on a GPU, in a copy of this folder with so/, once and plan.json (build.sh). Some 110 seconds.
cd "$1"; OUT=$2; mkdir -p "$OUT"
export LD_LIBRARY_PATH=/usr/local/cuda/lib64:$LD_LIBRARY_PATH
timeout 92 python3 bench.py plan.json "$OUT" > "$OUT/bench.txt" 2>&1; echo bench rc $?; tail -1 "$OUT/bench.txt"
M=sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__inst_executed_pipe_tensor.sum,gpc__cycles_elapsed.max,smsp__inst_executed.sum
timeout 15 ncu --launch-skip 2 --launch-count 2 --metrics $M ./once so/base.so 2 128 1 16 16 16384 16384 1 -1 > "$OUT/ncu.txt" 2>&1; echo ncu rc $?; tail -15 "$OUT/ncu.txt"
