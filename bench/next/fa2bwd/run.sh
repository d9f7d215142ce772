#!/bin/bash
F=$(realpath $1); mkdir -p $2; O=$(realpath $2); P=/tmp/fa2bwd_pack; mkdir -p $P; tar xJf $F/pack.tar.xz -C $P; export LD_LIBRARY_PATH=$P; cd $F/bench/compare
timeout 50 python3 vbench.py $P/libtessera.so $P $(cat $F/names) 34 > $O/bench.txt 2>&1; cat $O/bench.txt | cut -c1-700
[ $(grep -c torch $O/bench.txt) -lt 2 ] && timeout 25 python3 vbench.py $P/libtessera.so $P main,p,r2 12 > $O/bench_p.txt 2>&1
M=gpu__time_duration.sum,sm__inst_executed_pipe_tensor.sum,sm__inst_executed.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__cycles_elapsed.max,l1tex__data_pipe_lsu_wavefronts.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,smsp__issue_active.avg.pct_of_peak_sustained_active
for s in barrier branch_resolving dispatch_stall drain imc_miss lg_throttle long_scoreboard math_pipe_throttle membar mio_throttle no_instruction not_selected selected short_scoreboard sleeping wait; do M=$M,smsp__average_warps_issue_stalled_${s}_per_issue_active.ratio; done
for d in 128 64; do
timeout 60 ncu --csv --page raw --metrics $M -k "regex:backward_kernel|flash_bwd_dq_dk_dv" python3 vprof.py $P/libtessera.so $P $(cat $F/profnames) $d > $O/ncu$d.csv 2>$O/ncu$d.err; wc -l $O/ncu$d.csv; done
